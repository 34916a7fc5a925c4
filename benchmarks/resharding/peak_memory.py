"""Peak private memory of a slot's processes during a session, above what they held before it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

_PERIOD_SECONDS = 0.004
_PAGE = 4096


class PeakMemory:
    """Context that measures private pages: shared buffers have a known size, leases are the trainer's."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._end = threading.Event()
        self._before = 0
        self.extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._before = self._private()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._end.wait(_PERIOD_SECONDS):
            self._look()

    def _look(self) -> None:
        self.extra_bytes = max(self.extra_bytes, self._private() - self._before)

    def _private(self) -> int:
        pages = 0
        for pid in self._pids:
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(resident) - int(shared)
        return pages * _PAGE


def family(root: int) -> list[int]:
    """Return the pids of a process and all its descendants."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
