"""Processes that tests look for by what they run."""

import contextlib

import psutil


def children(
    word: str, parent: psutil.Process | None = None, *, recursive: bool = False
) -> list[psutil.Process]:
    """Return the children of a process (this one by default) with the word in their command. One that has ended is left out, also
    if nobody has waited for it yet: psutil raises where its command is asked for."""
    matching = []
    for process in (parent or psutil.Process()).children(recursive=recursive):
        with contextlib.suppress(psutil.Error):
            matching += [process] if word in " ".join(process.cmdline()) else []
    return matching
