"""Log files of worker processes: each writes its output to its own file in the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn, TextIO

from mrl.observe.streams import lossy, write_stderr
from mrl.user_code import search_path

LAST_WORDS = "last words: "
CRASH = "Fatal Python error: "
"""Start of faulthandler's output, written to the log if a fatal signal such as SIGSEGV ends the process."""


def leave(reason: str, code: int) -> NoReturn:
    """Exit this process at once; the driver adds the reason to its report of the death."""
    write_stderr(f"\n{LAST_WORDS}{reason}")
    os._exit(code)


def last_words(folder: Path) -> str:
    """Return why workers that log to this folder exited or crashed; empty if none did."""
    reasons = []
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(LAST_WORDS):
                reasons.append(line.removeprefix(LAST_WORDS))
            elif line.startswith(CRASH):
                reasons.append(f"{path.name}: {line.removeprefix(CRASH)}")
    return "; ".join(reasons)


def last_word(folder: Path, name: str) -> str:
    """Return why the worker of this name exited, if it wrote that last, else "". Lines of multiprocessing's
    resource tracker, which outlives it, are skipped."""
    path = folder / f"{file_name(name)}.log"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    last = next((line for line in reversed(lines) if line.strip() and "resource_tracker" not in line), "")
    return last.removeprefix(LAST_WORDS) if last.startswith(LAST_WORDS) else ""


def file_name(name: str) -> str:
    """Return the stem of a worker's log file: "engine 0, dp rank 1" writes engine-0-dp-rank-1.log."""
    return name.replace(",", "").replace(" ", "-")


def original_stdout() -> TextIO:
    """Return this process's current standard output, for lines that must stay visible after `redirect`."""
    return lossy(os.dup(1))


def redirect(folder: str, name: str) -> None:
    """Append stdout, stderr and log records to folder/name.log; also move the working folder, which Ray puts
    first in sys.path, to its end."""
    sys.path[:] = search_path()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = lossy(1), lossy(2)
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
