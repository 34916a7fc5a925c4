"""Which faults a soak has, drawn by a seed before it starts: processes killed, paused and stopped, a full disk, a clock that jumps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from mrl.observe.phases import PHASES

DISK, CLOCK = "disk", "clock"
"""Targets that are no process; they are the soak's own business and have no phase."""
KILLED = "driver train-0 train-1 engine-0 engine-1 reward raylet gcs agent watcher"
"""Every kind of process that a run on one machine has."""
PAUSED = "driver train-0 engine-1 reward raylet gcs"
STOPPED = "train-1 engine-0 raylet gcs"
"""For good. Of a driver nobody waits for an answer, and a stopped verifier has a deadline of its own that a paused one comes near to."""
DECK = (
    *(f"{target}:kill" for target in KILLED.split()),
    *(f"{target}:pause" for target in PAUSED.split()),
    *(f"{target}:stop" for target in STOPPED.split()),
    "driver:term",
    *[f"{DISK}:full"] * 2,
    f"{CLOCK}:3600",
    f"{CLOCK}:-86400",
)
"""TARGET:HOW, as of faults.py; of a clock the seconds that it jumps by. Each comes before any comes again."""
JITTER = 0.3
"""Of the steps between two faults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come."""

    step: int
    """From 1: the step that has it, or which it comes after where it has no phase."""
    target: str
    how: str
    phase: str = ""

    @property
    def of_process(self) -> bool:
        return bool(self.phase)

    def words(self, first_step: int) -> str:
        """MRL_FAULT's, for a start whose first step is `first_step`; empty where it has no such step. Every step has every phase once: that of
        saving too, where nothing is saved."""
        count = self.step - first_step + 1
        if count < 1 or not self.of_process:
            return ""
        timing = "" if self.how == "kill" else f":{self.how}@0"
        return f"{self.phase}:{self.target}:{count}{timing}"

    def __str__(self) -> str:
        return f"{self.target} {self.how}" + f" in {self.phase}" * self.of_process


def draw(seed: int, *, steps: int, number: int, save_every: int, deck: Sequence[str] = DECK) -> list[Fault]:
    """So many faults in order of their steps, which lie evenly but for the dice; all of the deck, and all phases, before any comes again."""
    dice = random.Random(seed)
    cards, phases = _dealt(deck, dice), _dealt(PHASES, dice)
    spacing = steps / (number + 1)
    faults = []
    for place in range(1, number + 1):
        target, _, how = next(cards).partition(":")
        step = max(2, round((place + dice.uniform(-JITTER, JITTER)) * spacing))
        phase = "" if target in (DISK, CLOCK) else next(phases)
        if phase == "save":
            step = min(max(1, round(step / save_every)), steps // save_every) * save_every
        faults.append(Fault(step, target, how, phase))
    return sorted(faults, key=lambda fault: fault.step)


def _dealt(deck: Sequence[str], dice: random.Random) -> Iterator[str]:
    """Cards for ever, shuffled anew when all have been dealt."""
    while True:
        yield from dice.sample(deck, len(deck))
