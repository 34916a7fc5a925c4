"""The `mrl` command: parses arguments and turns errors into exit codes.

`runs` and `configs` define the arguments of each command and import its work when it is called.
Exit codes: 0 done, 1 failed while running, 2 bad input (configuration, data), 4 all steps done and nothing
learned, 99 stopped and to be queued again, 128 + n stopped by signal n (130: Ctrl-C).
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
from mrl.cli.convert import add_convert_to
from mrl.cli.sandboxes import add_sandboxes_to
from mrl.errors import ConfigError, DataError, MrlError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of writes; they do not name a file."""
FORMER_COMMANDS = {
    "bench": "removed: run python -m benchmarks.schedules in the repository to measure schedules",
    "data --json": "removed: programs call mrl.data.load_rows.load_data",
    "diagnose --json": "removed: mrl diagnose RUN writes diagnosis.md",
    "difficulty": "removed: `mrl eval CONFIG --train --out FOLDER` writes FOLDER/rates.jsonl, which "
    "data.difficulty.file reads",
    "make chains": "removed: `mrl tune` does not train models that score single steps",
    "make domains": "removed: list entries in data.train, each with its domain (docs/data.md)",
    "make judgements": "removed: tune a judge on conversations of its question and the correct verdict "
    "(docs/design/rewards.md)",
    "plan --json": "removed: programs use mrl.capacity.estimate.Estimate; the exit code says if it fits",
    "plan --stream": "removed: docs/running-ahead.md estimates the gain of loop.schedule=stream",
    "replay": "removed: schedules are not recorded; loop.deterministic repeats a run bit by bit, and "
    "mrl audit RUN checks its prompts",
    "sft": "renamed to tune",
    "warm-start": "renamed to tune",
    "watch": "removed: mrl report RUN writes a page and mrl samples RUN prints samples, also during a run; "
    "logging.trackers shows live curves",
}
"""Former command, or command with a former first argument or option -> its replacement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; print errors of this package and of files as one message."""
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
        if error.filename is None and error.errno not in _DISK_ERRORS:
            raise  # a bug: keep the traceback
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"mrl: {printable(f'{place}{error.strerror}')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mrl: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; accept files and overrides after options too, which argparse alone rejects."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next(iter(words), "")
    switches = [word for word in words[2:] if word.startswith("-")]
    for former in (command, *(f"{command} {word}" for word in (*words[1:2], *switches))):
        if former in FORMER_COMMANDS:
            parser.error(f"{former} is {FORMER_COMMANDS[former]}")
    options, extras = parser.parse_known_args(arguments)
    if extras and (not hasattr(options, "config") or any(word.startswith("-") for word in extras)):
        parser.error(f"unrecognized arguments: {' '.join(extras)}")
    if extras:
        options.config = [*options.config, *extras]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="Train mixture-of-experts language models with reinforcement learning: Megatron trains, "
        "vLLM generates.",
        epilog="`mrl settings` lists all settings; README.md shows a first run. Exit codes: 0 done; 1 "
        "failed, or a check did not pass; 2 bad input; 4 done, but every advantage was 0; 99 stopped, to be "
        "queued again; 128 + n stopped by signal n (130: Ctrl-C).",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    configs.add_training_to(commands)
    add_convert_to(commands)
    runs.add_to(commands)
    add_sandboxes_to(commands)
    configs.add_inspection_to(commands)
    return parser


class _Version(argparse.Action):
    """Action that looks up the version only if it is requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"mrl {importlib.metadata.version('mrl')}")
        parser.exit()
