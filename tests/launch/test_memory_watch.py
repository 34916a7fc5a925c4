"""Memory at the ends of phases: which are measured, how processes are combined, and one process's report."""

from __future__ import annotations

import pytest
import torch

from mrl.launch.workers.memory_watch import MemoryWatch
from mrl.observe.memory_use import memory_use
from mrl.observe.metric_names import undescribed
from mrl.observe.phases import PhaseClock


class Workers:
    """Returns its figures one after the other."""

    def __init__(self, *uses: dict[str, float]) -> None:
        self._uses = list(uses)

    def memory_use(self) -> dict[str, float]:
        return self._uses.pop(0)


def test_each_phase_keeps_its_tightest_end() -> None:
    clock = PhaseClock()
    ranks = Workers({"gpu_free": 3.0, "gpu_peak": 1.0}, {"gpu_free": 5.0, "gpu_peak": 2.0}, {"gpu_free": 9.0})
    clock.listeners.append(MemoryWatch(clock, {"trainer": ranks}))
    for phase in ("generate", "reward", "generate", "sync"):
        with clock.phase(phase):
            pass
    metrics = {name: value for name, value in clock.take().items() if name.startswith("mem/")}
    assert metrics == {
        "mem/gpu_free/trainer/generate": 3.0,
        "mem/gpu_peak/trainer/generate": 2.0,
        "mem/gpu_free/trainer/sync": 9.0,
    }
    assert undescribed(metrics) == [] and clock.take() == {}


def test_without_a_gpu_a_process_tells_of_its_host() -> None:
    use = memory_use(torch.device("cpu"))
    assert use.keys() == {"host_used", "host_free"}
    assert use["host_used"] > 1 << 20 and use["host_free"] > 0


def test_on_a_gpu_the_peak_is_since_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"since": 7}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    for name, value in {"memory_reserved": 5, "memory_allocated": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["since"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(since=4))
    first, second = (memory_use(torch.device("cuda", 0)) for _ in range(2))
    assert [first[f"gpu_{name}"] for name in ("free", "reserved", "allocated", "peak")] == [10, 5, 4, 7]
    assert second["gpu_peak"] == 4
