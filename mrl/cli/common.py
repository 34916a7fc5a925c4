"""Shared by all commands: arguments of a configuration, and output on a terminal."""

from __future__ import annotations

import argparse
import os
import sys

CONFIG_HELP = "CONFIG.yaml ... a.b.c=value ... (files are merged from left to right, then the values)"


def add_command(
    commands, name: str, text: str, example: str, exits: str = "0 done; 1 failed; 2 bad input"
) -> argparse.ArgumentParser:
    """Add a command; its help says what it does, and has an example and the exit codes."""
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  mrl {example}\n\nexit codes:\n  " + exits.replace("; ", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def config_command(commands, name: str, run, *words: str) -> argparse.ArgumentParser:
    """Add a command that takes configuration files and overrides; `words`: text, example, exit codes."""
    command = add_command(commands, name, *words)
    command.add_argument("config", nargs="+", help=CONFIG_HELP)
    command.set_defaults(run=run)
    return command


def command_config(options: argparse.Namespace, *overrides: str):
    """Load the configuration that the command line names."""
    from mrl.config.load import load_config

    return load_config(*options.config, *overrides)


def printable(text: str) -> str:
    """Escape terminal control characters in a text that models or users may have written."""
    from mrl.report.terminal import plain

    return "\n".join("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))


def print_answer(text: str) -> int:
    """Print a result and return 0, also if the reader closes the pipe early (`mrl settings | head`)."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
