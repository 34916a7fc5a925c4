"""What a process holds: for tests that many sessions leave it as it was."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
from pathlib import Path

TOLERANCE = 16 << 20
"""Bytes that memory may differ by."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    memory: int
    """Private bytes."""
    descriptors: int
    threads: int
    mappings: int
    """Of shared segments and leased memory."""

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        rows = (row.split() for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        private = sum(int(row[1]) for row in rows if row[0].startswith("Private"))
        maps = Path("/proc/self/maps").read_text()
        return cls(
            private << 10,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            maps.count("memfd:"),
        )

    def require_as(self, before: Footprint) -> None:
        """As before in everything; memory within the tolerance."""
        assert self.memory - before.memory <= TOLERANCE, (before, self)
        mine = (self.descriptors, self.threads, self.mappings)
        assert mine == (before.descriptors, before.threads, before.mappings), (before, self)
