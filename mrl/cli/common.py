"""What commands have in common: the words of a configuration, and answers on standard output."""

from __future__ import annotations

import argparse
import os
import sys

CONFIG_HELP = "CONFIG.yaml ... a.b.c=value ... (files are merged left to right, then the values)"


def config_command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    """A command that takes files and values of a configuration."""
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("config", nargs="+", help=CONFIG_HELP)
    command.set_defaults(run=run)
    return command


def command_config(options: argparse.Namespace, *overrides: str):
    """The configuration that a command was given."""
    from mrl.config.load import load_config

    return load_config(*options.config, *overrides)


def printable(text: str) -> str:
    """The text as a terminal may be given it, whoever wrote parts of it: what would steer one is escaped."""
    from mrl.report.terminal import plain

    return "\n".join("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))


def print_answer(text: str) -> int:
    """Prints what a command was asked for; a reader that leaves early (`mrl settings | head`) has what it wanted."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
