"""Record one step of one trainer rank: torch's profiler, ranges by phase, and CUDA's allocation history.

Open `profile/step-N-rank-R.json.gz` in the run's folder with Perfetto (ui.perfetto.dev), `...memory.pickle`
on pytorch.org/memory_viz. For Nsight Systems the phases are NVTX ranges. The GPU parts have not run on a GPU
yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MOST_ALLOCATIONS = 100_000
"""Allocations and frees in a memory snapshot."""


class Profiler:
    """Records one step at a time: start, phases, stop."""

    def __init__(self, folder: Path, *, rank: int, device: torch.device, memory: bool) -> None:
        """Create a profiler; `memory` also records a GPU's allocations, with stack traces."""
        self._folder, self._rank = folder, rank
        self._on_gpu = device.type == "cuda"
        self._memory = memory and self._on_gpu
        self._profile: profile | None = None
        self._ranges: list[record_function] = []
        self._step = 0

    def start(self, step: int) -> None:
        """Start recording."""
        gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._step, self._profile = step, profile(activities=[ProfilerActivity.CPU, *gpu])
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile.start()

    def enter(self, phase: str) -> None:
        """Start a phase; phases may be nested."""
        self._ranges.append(record_function(f"mrl/{phase}"))
        self._ranges[-1].__enter__()
        if self._on_gpu:
            torch.cuda.nvtx.range_push(phase)

    def leave(self) -> None:
        """End the innermost phase."""
        if self._on_gpu:
            torch.cuda.nvtx.range_pop()
        self._ranges.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """Stop recording and write the files."""
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
