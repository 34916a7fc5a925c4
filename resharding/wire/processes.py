"""Who a process is: its pid together with its start time, so that a reused pid is not mistaken for a living
peer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from mrl.errors import WeightSyncError


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and the process's start (field 22 of /proc/pid/stat)."""

    @classmethod
    def own(cls) -> ProcessId:
        pid = os.getpid()
        ticks = _start_ticks(pid)
        assert ticks is not None
        return cls(pid, ticks)

    def alive(self) -> bool:
        """False once the process ended, also while it is a zombie or when its pid was given away again."""
        return _start_ticks(self.pid) == self.start_ticks


@contextlib.contextmanager
def file_of_process(owner: ProcessId, fd: int, what: str) -> Iterator[tuple[int, str]]:
    """(descriptor of our own, path) of a file that another process has open as `fd`; WeightSyncError names
    `what`."""
    path = f"/proc/{owner.pid}/fd/{fd}"
    if not owner.alive():
        raise WeightSyncError(f"{what} of process {owner.pid}: that process is gone or its pid was reused")
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"cannot open the {what} {path}: {error}; is the peer of the same user?"
        ) from error
    try:
        yield own, path
    finally:
        os.close(own)


def _start_ticks(pid: int) -> int | None:
    """None when there is no such living process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
