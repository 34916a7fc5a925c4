"""A recorded step: the profiler's events are in the run's folder, inside the phases they happened in."""

from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import mrl.training.profiler as module
from mrl.training.profiler import Profiler


def test_a_record_has_the_phases_and_what_ran_in_them(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", rank=3, device=torch.device("cpu"), memory=True)
    for step in (2, 5):
        profiler.start(step)
        profiler.enter("update")
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        profiler.leave()
        profiler.enter("sync")  # ended by stop()
        profiler.stop()
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["step-2-rank-3.json.gz", "step-5-rank-3.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "profile" / files[1]).read_bytes()))["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event}
    start, end = spans["mrl/update"]
    product = spans["aten::mm"]
    assert start <= product[0] <= product[1] <= end <= spans["mrl/sync"][0]


@pytest.mark.parametrize("memory", [False, True])
def test_on_a_gpu_its_work_its_allocations_and_the_phases_are_recorded(memory, tmp_path, monkeypatch) -> None:
    """The calls of torch.cuda have arguments that torch's own functions take."""
    calls: list[str] = []

    def recorded(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            inspect.signature(real).bind(*arguments, **options)
            calls.append(" ".join([real.__name__, *map(str, arguments), *map(str, options.values())]))

        return call

    for owner, name in (
        *((torch.cuda.nvtx, name) for name in ("range_push", "range_pop")),
        *((torch.cuda.memory, name) for name in ("_record_memory_history", "_dump_snapshot")),
    ):
        monkeypatch.setattr(owner, name, recorded(getattr(owner, name)))

    def profile(*, activities: list[ProfilerActivity]) -> Any:
        calls.append("profile " + " ".join(activity.name for activity in activities))
        nothing = lambda *arguments: None  # noqa: E731
        return SimpleNamespace(start=nothing, stop=nothing, export_chrome_trace=nothing)

    monkeypatch.setattr(module, "profile", profile)
    profiler = Profiler(tmp_path, rank=3, device=torch.device("cuda"), memory=memory)
    profiler.start(2)
    for phase in ("update", "sync"):
        profiler.enter(phase)
        profiler.leave()
    profiler.stop()
    ranges = ["range_push update", "range_pop", "range_push sync", "range_pop"]
    history = [f"_record_memory_history {module.MOST_ALLOCATIONS}"] * memory
    snapshot = [f"_dump_snapshot {tmp_path}/step-2-rank-3.memory.pickle", "_record_memory_history None"]
    assert calls == ["profile CPU CUDA", *history, *ranges, *snapshot * memory]
