"""Draw a soak's faults by a seed: processes killed, paused and stopped, a full disk, a clock that jumps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from mrl.observe.phases import PHASES

DISK, CLOCK = "disk", "clock"
"""Targets that are not processes: the soak causes these faults itself, outside any phase."""
KILLED = "driver train-0 train-1 engine-0 engine-1 reward raylet gcs agent watcher"
"""Every kind of process in a run on one machine."""
PAUSED = "driver train-0 engine-1 reward raylet gcs"
STOPPED = "train-1 engine-0 raylet gcs"
"""Stopped forever. Nobody waits for a driver; a verifier has a deadline, which a pause nearly reaches."""
DECK = (
    *(f"{target}:kill" for target in KILLED.split()),
    *(f"{target}:pause" for target in PAUSED.split()),
    *(f"{target}:stop" for target in STOPPED.split()),
    "driver:term",
    *[f"{DISK}:full"] * 2,
    f"{CLOCK}:3600",
    f"{CLOCK}:-86400",
)
"""TARGET:HOW as in faults.py; a clock's HOW is its jump in seconds. Each comes before any comes again."""
JITTER = 0.3
"""Share of the steps between two faults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    step: int
    """Step of the fault, from 1; without a phase it comes after this step."""
    target: str
    how: str
    phase: str = ""

    @property
    def of_process(self) -> bool:
        return bool(self.phase)

    def words(self, first_step: int) -> str:
        """Return MRL_FAULT's words if a run starts at `first_step`; empty if the fault's step is earlier.
        Each step has each phase once, also `save` if nothing is saved."""
        count = self.step - first_step + 1
        if count < 1 or not self.of_process:
            return ""
        timing = "" if self.how == "kill" else f":{self.how}@0"
        return f"{self.phase}:{self.target}:{count}{timing}"

    def __str__(self) -> str:
        return f"{self.target} {self.how}" + f" in {self.phase}" * self.of_process


def draw(seed: int, *, steps: int, number: int, save_every: int, deck: Sequence[str] = DECK) -> list[Fault]:
    """Draw `number` faults in order of steps, almost evenly spaced; cards and phases repeat when all came."""
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
    """Yield cards forever, shuffled again when all have been dealt."""
    while True:
        yield from dice.sample(deck, len(deck))
