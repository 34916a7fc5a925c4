"""Each worker process writes what it prints into a file of its own in the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn, TextIO

from mrl.observe.streams import lossy, say
from mrl.own_code import search_path

LAST_WORDS = "last words: "
CRASH = "Fatal Python error: "
"""How faulthandler begins, which writes into the log when a signal ends a process that the process could not answer."""


def leave(reason: str, code: int) -> NoReturn:
    """Ends this process at once; the driver adds the reason to the death it reports."""
    say(f"\n{LAST_WORDS}{reason}")
    os._exit(code)


def last_words(folder: Path) -> str:
    """Why workers that write into this folder ended themselves, or crashed; empty where none did."""
    found = []
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(LAST_WORDS):
                found.append(line.removeprefix(LAST_WORDS))
            elif line.startswith(CRASH):
                found.append(f"{path.name}: {line.removeprefix(CRASH)}")
    return "; ".join(found)


def last_word(folder: Path, name: str) -> str:
    """Why the worker of this name ended itself, where that is the last that it wrote; empty otherwise. Multiprocessing's resource
    tracker outlives it, and may tell of what is left."""
    path = folder / f"{file_name(name)}.log"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    said = next((line for line in reversed(lines) if line.strip() and "resource_tracker" not in line), "")
    return said.removeprefix(LAST_WORDS) if said.startswith(LAST_WORDS) else ""


def file_name(name: str) -> str:
    """Of a worker's log, without its ending: "engine 0, dp rank 1" writes engine-0-dp-rank-1.log."""
    return name.replace(",", "").replace(" ", "-")


def original_stdout() -> TextIO:
    """This process' standard output as it is now, for lines of ours that are still to be seen after `redirect`."""
    return lossy(os.dup(1))


def redirect(folder: str, name: str) -> None:
    """Sends stdout, stderr and log records of this process to folder/name.log (appending). Ray has put the working folder first
    where modules are looked for; from here on it is last."""
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
