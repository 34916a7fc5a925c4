"""Resources of a process, to check that many sessions leave them unchanged."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import threading
from pathlib import Path

TOLERANCE = 16 << 20
"""Bytes by which memory may grow over all marks."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    memory: int
    descriptors: int
    threads: int
    mappings: int
    """Bytes of shared segments and leased memory."""

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        rows = (row.split() for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        private = sum(int(row[1]) for row in rows if row[0].startswith("Private"))
        maps = Path("/proc/self/maps").read_text()
        return cls(
            private << 10, len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd:")
        )

    def counts(self) -> tuple[int, int, int]:
        return self.descriptors, self.threads, self.mappings


def require_no_leak(marks: list[Footprint]) -> None:
    """Check that counts equal the first mark's and that memory does not grow in every interval.

    A leak grows in every interval; a heap that requests more memory grows in one.
    """
    assert marks[-1].counts() == marks[0].counts(), marks
    growth = min(after.memory - before.memory for before, after in itertools.pairwise(marks))
    assert growth * (len(marks) - 1) <= TOLERANCE, marks
