"""Text streams that ignore a full disk: output that does not fit is lost, and the run continues."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _LossyFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def lossy(descriptor: int) -> TextIO:
    """Return an open descriptor as a line-buffered stream; closing the stream leaves the descriptor open."""
    raw = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def write_stderr(text: str) -> None:
    """Write a line to standard error, even in a signal handler that interrupts a user of the stream."""
    with contextlib.suppress(OSError):  # a full disk
        os.write(2, f"{text}\n".encode())


def survive_full_disks() -> None:
    """Make this process's own output lossy; streams that others put in its place stay."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = lossy(1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(2)
