"""Records one step of one trainer rank: torch's profiler, ranges by phase, and the history of CUDA's allocations.

`profile/step-N-rank-R.json.gz` in the run's folder opens in Perfetto (ui.perfetto.dev), `...memory.pickle` on
pytorch.org/memory_viz. Where Nsight Systems follows the process, the phases are NVTX ranges. The GPU's parts have not
run on a GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MOST_ALLOCATIONS = 100_000
"""Allocations and frees that a memory snapshot goes back."""


class Profiler:
    """One step at a time: start, phases, stop."""

    def __init__(self, folder: Path, *, rank: int, device: torch.device, memory: bool) -> None:
        """`memory`: also the allocations of a GPU, with where they were made."""
        self._folder, self._rank = folder, rank
        self._on_gpu = device.type == "cuda"
        self._memory = memory and self._on_gpu
        self._profile: profile | None = None
        self._ranges: list[record_function] = []
        self._step = 0

    def start(self, step: int) -> None:
        """Begins to record."""
        gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._step, self._profile = step, profile(activities=[ProfilerActivity.CPU, *gpu])
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile.start()

    def enter(self, phase: str) -> None:
        """A phase begins; phases may be nested."""
        self._ranges.append(record_function(f"mrl/{phase}"))
        self._ranges[-1].__enter__()
        if self._on_gpu:
            torch.cuda.nvtx.range_push(phase)

    def leave(self) -> None:
        """The phase that began last ends."""
        if self._on_gpu:
            torch.cuda.nvtx.range_pop()
        self._ranges.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """Ends the record and writes it."""
        while self._ranges:
            self.leave()
        recorded, self._profile = self._profile, None
        assert recorded is not None, "stop() without start()"
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._step}-rank-{self._rank}"
        recorded.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._memory:
            memory: Any = torch.cuda.memory
            memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
            memory._record_memory_history(enabled=None)
