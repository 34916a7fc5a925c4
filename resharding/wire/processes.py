"""Identity of a process: its pid and start time, so that a reused pid is not mistaken for a live peer."""

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
    """Clock ticks from boot to the process's start (field 22 of /proc/pid/stat)."""

    @classmethod
    def own(cls) -> ProcessId:
        pid = os.getpid()
        ticks = _start_ticks(pid)
        assert ticks is not None
        return cls(pid, ticks)

    def alive(self) -> bool:
        """Return False once the process has ended, even if it is a zombie or its pid was reused."""
        return _start_ticks(self.pid) == self.start_ticks


@contextlib.contextmanager
def file_of_process(owner: ProcessId, fd: int, name: str) -> Iterator[tuple[int, str]]:
    """Open a file that another process has open as `fd`; yield (this process's descriptor, path).

    `name` names the file in a WeightSyncError."""
    path = f"/proc/{owner.pid}/fd/{fd}"
    if not owner.alive():
        raise WeightSyncError(f"{name} of process {owner.pid}: that process is gone or its pid was reused")
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"cannot open the {name} {path}: {error}; does the peer run as the same user?"
        ) from error
    try:
        yield opened, path
    finally:
        os.close(opened)


def _start_ticks(pid: int) -> int | None:
    """Return the process's start ticks; None if no such process is alive."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
