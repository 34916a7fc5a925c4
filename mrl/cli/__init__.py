"""The `mrl` command.

Owns exit codes; the commands' arguments are in `runs` and `configs`, and the work of each is in the package it
belongs to, imported when called.
Exit codes: 0 done, 2 bad input (configuration, data), 1 failed while running, 4 all steps done
and nothing learned, 99 stopped to be queued again.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence

from mrl.cli import configs, runs
from mrl.cli.common import printable
from mrl.errors import ConfigError, DataError, MrlError

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of writing, which do not name a file."""
FORMER_COMMANDS = {
    "bench": "removed: python -m benchmarks.schedules, of the repository, measures schedules",
    "data --json": "removed: mrl.data.load_rows.load_data gives programs the rows",
    "diagnose --json": "removed: mrl diagnose RUN writes diagnosis.md",
    "make chains": "removed: `mrl tune` trains no model that scores steps",
    "make domains": "removed: data.train takes a list of entries with a domain each (docs/data.md)",
    "make judgements": "removed: tune a judge on messages of its question and the verdict that is due "
    "(docs/design/rewards.md)",
    "plan --json": "removed: mrl.capacity.estimate.Estimate has the figures for programs; the exit code says whether it fits",
    "plan --stream": "removed: docs/running-ahead.md says how to estimate what loop.schedule=stream gains",
    "replay": "removed: no schedule is recorded; loop.deterministic repeats a run to the bit, and mrl audit RUN "
    "checks its prompts",
    "sft": "renamed to tune",
    "warm-start": "renamed to tune",
    "watch": "removed: mrl report RUN writes a page and mrl samples RUN prints samples, also while a run goes "
    "on; logging.trackers shows curves live",
}
"""A former command, or a command and a former first word or option of it -> what became of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors of ours become one message and an exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = _parse(arguments)
    try:
        return options.run(options)
    except (ConfigError, DataError) as error:
        print(f"mrl: {printable(str(error))}", file=sys.stderr)
        return 2
    except MrlError as error:
        print(f"mrl: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _OF_THE_DISK:
            raise  # a fault of ours, whose place its traceback tells
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"mrl: {printable(f'{place}{error.strerror}')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mrl: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments; files and overrides may also stand behind options, which argparse alone refuses."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next(iter(words), "")
    switches = [word for word in words[2:] if word.startswith("-")]
    for former in (command, *(f"{command} {word}" for word in (*words[1:2], *switches))):
        if former in FORMER_COMMANDS:
            parser.error(f"{former} is {FORMER_COMMANDS[former]}")
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "config") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.config = [*options.config, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="Reinforcement learning for mixture-of-experts language models: Megatron trains and "
        "vLLM generates.",
        epilog="`mrl settings` prints every setting with one sentence; README.md has a first run.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    configs.add_training_to(commands)
    runs.add_to(commands)
    configs.add_asking_to(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"mrl {importlib.metadata.version('mrl')}")
        parser.exit()
