"""Shared by all commands: arguments of a configuration, and output on a terminal."""

from __future__ import annotations

import argparse
import os
import sys

CONFIG_HELP = "CONFIG.yaml ... a.b.c=value ... (files are merged from left to right; values override them)"
EXITS = ("0 done", "1 failed", "2 bad input")
_STOPPED = ("99 stopped by SIGUSR1, to be queued again", "128 + n stopped by signal n (130: Ctrl-C)")
_QUICK, _RUN = "configs/quickstart.yaml", "runs/quickstart"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (f"train {_QUICK} loop.steps=20", *EXITS, "4 done, but every advantage was 0", *_STOPPED),
    "tune": ("tune configs/quickstart.yaml configs/tune_dpo.yaml", *EXITS, *_STOPPED),
    "make": ("make arithmetic --out data/arithmetic",),
    "data": (f"data {_QUICK}",),
    "convert": ("convert model.gguf --out models/moe --experts 4",),
    "eval": (f"eval {_QUICK} model.path=exported --out results",),
    "rewards": (f"rewards try {_QUICK}",),
    "show": (f'rewards show {_QUICK} --row 7 --response "12" --explain',),
    "try": (f"rewards try {_QUICK} --rows 20", "0 no errors", "1 failed, or found errors", EXITS[2]),
    "check": (
        f"rewards check {_QUICK} --gold labelled.jsonl --min-agreement 0.9",
        *("0 accuracy is high enough", "1 failed, or accuracy is too low", EXITS[2]),
    ),
    "plan": (f"plan {_QUICK} --hardware 8x80gb", "0 the run fits", "1 failed, or does not fit", EXITS[2]),
    "settings": ("settings rollout.tp",),
    "report": (f"report {_RUN} runs/faster",),
    "audit": (f"audit {_RUN}", "0 the check passed", "1 failed, or the check did not pass", EXITS[2]),
    "diagnose": (f"diagnose {_RUN}",),
    "samples": (f"samples {_RUN} --limit 3",),
    "export": (f"export {_RUN} --out exported",),
    "sandboxes": (
        "sandboxes --key-file sandboxes.key --image 'python:*' --kind docker",
        *("0 stopped by SIGTERM or Ctrl-C", EXITS[1], EXITS[2]),
    ),
}
"""Command -> an example, and its exit codes if they are not EXITS."""


def add_command(commands, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command; its help says what it does, and has an example and its exit codes."""
    example, *exits = EXAMPLES[name]
    end = f"example:\n  mrl {example}\n\nexit codes:\n  " + "\n  ".join(exits or EXITS)
    form = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=text, description=text, epilog=end, formatter_class=form)


def config_command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    """Add a command that takes configuration files and overrides."""
    command = add_command(commands, name, text)
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


def print_result(text: str) -> int:
    """Print a result and return 0, also if the reader closes the pipe early (`mrl settings | head`)."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
