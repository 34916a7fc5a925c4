"""A clock that counts engine steps: what a stream does is a function of its configuration, whatever anything takes in seconds.

| of | is seen |
|---|---|
| engines | one tick (a call of each) at every look, of all that have calls under way: they tick together |
| a trainer at work beside them | after UPDATE_TICKS looks, sooner or later as it is in seconds |
| answers of environments | in the look of the turn that they follow, and those to the turns of a run before beside them |
| a group's verdicts | in the look of its last response, or VERDICT_TICKS - 1 looks later; all together, by their samples |

Whoever is late by the wall is waited for. At a weight sync the count of verdicts that are still out begins anew, and a validation sees its own
alone, so that what comes after it is a function of ledger, weights and parked responses: a run that is ended there and resumed goes on as it would have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mrl.agents.answer import EnvironmentAnswer
from mrl.errors import RewardError
from mrl.loops.arrivals.as_they_come import Arrivals, Digests, Environments, RewardWorkers, Rollout
from mrl.rollout.request import Response, sample_of
from mrl.rollout.stint import Beats
from mrl.samples import Verdict

UPDATE_TICKS = 4
"""Ticks (16 steps) of engines on slots of their own beside one update. Best is about what an update takes; with fewer the engines
wait for it, with more the trainer for them."""
VERDICT_TICKS = 1
"""Ticks, that of a group's last response counted, until its verdicts are seen; 1 waits for them at once."""


class EngineTime(Arrivals):
    """One run's. A look is one poll of the driver."""

    def __init__(self, *, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._now = self._beside = 0
        self._due: dict[str, int] = {}
        """Look at which the verdict on a sample is seen."""
        self._held: set[str] = set()
        """Of those, what waits for the engines to go on."""
        self._early: dict[str, Verdict] = {}

    def pumps(self, rollout: Rollout, *, room: int, beside: bool, timeout_seconds: float) -> bool:
        """Beside a trainer that may need the driver only where no engine is waited for."""
        if not beside:
            return True
        waits = timeout_seconds or set(rollout.at_work()) <= set(rollout.ended(0.0))
        if not (self.owes_pumps() and waits):
            return False
        self._beside += 1
        return True

    def owes_pumps(self) -> bool:
        return self._beside < UPDATE_TICKS

    def trained(self, step: int, indices: Sequence[int], weights: Digests) -> None:
        self._beside = 0

    def patience(self, seconds: float) -> float:
        return 0.0

    def engines(self, rollout: Rollout, timeout_seconds: float) -> Sequence[int]:
        return rollout.at_work()

    @property
    def awaits_environments(self) -> bool:
        return True

    def answers(self, environments: Environments, timeout_seconds: float) -> list[EnvironmentAnswer]:
        return environments.poll(1.0)

    def answered(self, names: Sequence[str], *, rests: bool) -> None:
        self._due |= dict.fromkeys(names, self._now + VERDICT_TICKS)
        if rests:
            self._held |= set(names)

    def parked(self, responses: Sequence[Response], beats: Beats) -> None:
        self._held = set(self._due)

    def goes_on(self) -> None:
        self._held = set()
        self._due = dict.fromkeys(self._due, self._now + VERDICT_TICKS)

    def verdicts(self, workers: RewardWorkers, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        self._now += 1
        names = [name for name, due in self._due.items() if due <= self._now and name not in self._held]
        deadline = time.monotonic() + self._deadline_seconds
        while missing := [name for name in names if name not in self._early]:
            self._early |= dict(workers.collect(1.0))
            if time.monotonic() > deadline:
                raise RewardError(
                    f"stream.clock = logical: no verdict on sample {missing[0]} within loop.phase_deadline_seconds = "
                    f"{self._deadline_seconds:g} s"
                )
        for name in names:
            del self._due[name]
        return [(name, self._early.pop(name)) for name in sorted(names, key=sample_of)]
