"""Record the GPU and host memory of trainer ranks and engines at the end of each phase as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mrl.observe.memory_use import tightest
from mrl.observe.phases import Event, PhaseClock

PHASES = ("generate", "recompute", "update", "save", "sync")
"""Phases in which workers work; memory is read after each."""


def most_held(clock: PhaseClock) -> str:
    """Return the peak memory per kind of process at the ends of this step's phases; empty at first."""
    held = []
    for name, process in (("trainer", "a trainer rank"), ("engine", "an engine")):
        if sizes := clock.noted(f"mem/host_used/{name}/{phase}" for phase in PHASES).values():
            held.append(f"{process} {max(sizes) / 2**30:.1f} GiB")
    return f"earlier in this step, {' and '.join(held)} at most" if held else ""


class Workers(Protocol):
    """A group that reports its memory use."""

    def memory_use(self) -> dict[str, float]: ...


class MemoryWatch:
    """Listener of the clock; each metric is of the tightest process, over all ends of a phase in a step."""

    def __init__(self, clock: PhaseClock, groups: Mapping[str, Workers]) -> None:
        """`groups`: by their name in metrics."""
        self._clock, self._groups = clock, groups

    def __call__(self, event: Event) -> None:
        if event != "leave" or self._clock.current not in PHASES:
            return
        for name, group in self._groups.items():
            suffix = f"{name}/{self._clock.current}"
            metrics = {f"mem/{figure}/{suffix}": value for figure, value in group.memory_use().items()}
            self._clock.note(tightest([self._clock.noted(metrics), metrics]))
