"""Text streams for which a full disk is no error: what it does not take is lost, and the run goes on."""

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
    """An open descriptor as a stream written line by line; closing the stream leaves it open."""
    raw = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def say(text: str) -> None:
    """A line on standard error, also inside a signal handler, where the interrupted code may hold the stream."""
    with contextlib.suppress(OSError):  # a full disk
        os.write(2, f"{text}\n".encode())


def survive_full_disks() -> None:
    """From now on this process' own output is lossy; streams that others have put in its place stay."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = lossy(1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(2)
