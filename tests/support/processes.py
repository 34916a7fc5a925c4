"""Find processes by their commands."""

import contextlib

import psutil


def children(
    word: str, parent: psutil.Process | None = None, *, recursive: bool = False
) -> list[psutil.Process]:
    """Return a process's living children (by default this one's) with the word in their command."""
    matching = []
    for process in (parent or psutil.Process()).children(recursive=recursive):
        with contextlib.suppress(psutil.Error):
            matching += [process] if word in " ".join(process.cmdline()) else []
    return matching
