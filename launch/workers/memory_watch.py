"""What trainer ranks and engines have of their GPUs and hosts at the end of each phase, noted on the clock as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mrl.observe.memory_use import tightest
from mrl.observe.phases import Event, PhaseClock

PHASES = ("generate", "recompute", "update", "save", "sync")
"""After which workers are asked: those in which they work."""


def most_held(clock: PhaseClock) -> str:
    """Return what the largest process of each kind held at the ends of the step's phases so far; empty before the first."""
    held = []
    for name, process in (("trainer", "a trainer rank"), ("engine", "an engine")):
        if found := clock.noted(f"mem/host_used/{name}/{phase}" for phase in PHASES).values():
            held.append(f"{process} {max(found) / 2**30:.1f} GiB")
    return f"before, {' and '.join(held)} at most" if held else ""


class Workers(Protocol):
    """A group that can be asked."""

    def memory_use(self) -> dict[str, float]: ...


class MemoryWatch:
    """A listener of the clock. Each figure is that of the tightest process, over all ends of the phase in a step."""

    def __init__(self, clock: PhaseClock, groups: Mapping[str, Workers]) -> None:
        """`groups`: by the word that metrics have for them."""
        self._clock, self._groups = clock, groups

    def __call__(self, event: Event) -> None:
        if event != "leave" or self._clock.current not in PHASES:
            return
        for name, group in self._groups.items():
            own = f"{name}/{self._clock.current}"
            found = {f"mem/{figure}/{own}": value for figure, value in group.memory_use().items()}
            self._clock.note(tightest([self._clock.noted(found), found]))
