"""What a simulated run says of a choice, and the search for the best one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from mrl.pool.ledger import Admission
from mrl.simulation.leaves import Leaves
from mrl.simulation.load import Load
from mrl.simulation.world import StepTimes, World

MEASURED_STEPS = 4
"""Of a simulated run, after those in which the engines get as far ahead as they may."""
EQUAL = 0.02
"""Choices whose tokens per second differ by less than this share are as good as each other: the younger one is taken."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What is free to choose; equal slots and times give the smaller one first."""

    max_age: int
    engine_slots: int
    """The engines' own; 0 shares all slots with the trainer."""
    concurrency: int
    """Sequences of an engine at one time (rollout.max_num_seqs)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """Means over the simulated steps; seconds are simulated ones, shares are of a step."""

    choice: Choice
    step_seconds: float
    tokens_per_second: float
    trainer_busy: float
    engines_busy: float
    waits_for_responses: float
    """The trainer's, for its groups."""
    waits_for_verdicts: float
    engines_held: float
    """Engines that are free and get nothing to do, because every slot of the ledger is taken."""
    ages: dict[int, float]
    """Share of the trained tokens by age in versions."""
    age_mean: float
    age_bound: int
    resampled: float
    """Groups that the filter dropped, of each step."""

    @classmethod
    def of(cls, choice: Choice, rows: list[StepTimes], *, num_engines: int, age_bound: int) -> Forecast:
        """From the steps that are to be counted."""
        seconds, engines = sum(row.seconds for row in rows), num_engines
        tokens = sum(sum(row.ages.values()) for row in rows)
        ages = sorted({age for row in rows for age in row.ages})
        shares = {age: sum(row.ages.get(age, 0) for row in rows) / max(1, tokens) for age in ages}
        verdicts = sum(row.verdict_seconds for row in rows)
        return cls(
            choice=choice,
            step_seconds=seconds / len(rows),
            tokens_per_second=sum(row.tokens for row in rows) / seconds,
            trainer_busy=sum(row.train_seconds for row in rows) / seconds,
            engines_busy=sum(row.busy_seconds for row in rows) / seconds / engines,
            waits_for_responses=(sum(row.waited_seconds for row in rows) - verdicts) / seconds,
            waits_for_verdicts=verdicts / seconds,
            engines_held=sum(row.held_seconds for row in rows) / seconds / engines,
            ages=shares,
            age_mean=sum(age * share for age, share in shares.items()),
            age_bound=age_bound,
            resampled=sum(row.dropped for row in rows) / len(rows),
        )


class Placements(Protocol):
    """Ways to share the slots out, by the engines' own; 0 is among them where all can be shared."""

    def __iter__(self) -> Iterator[int]: ...

    def leaves(self, engine_slots: int) -> Leaves: ...

    def problems(self, engine_slots: int) -> list[str]:
        """Why a run would not start there."""
        ...


class Planner:
    """Simulates choices, each once."""

    def __init__(
        self, places: Placements, admission: Admission, load: Load, *, steps: int = MEASURED_STEPS
    ) -> None:
        """`admission`: of the configuration; its max_age is what is chosen here."""
        self._places, self._admission, self._load, self._steps = places, admission, load, steps
        self._known: dict[Choice, Forecast] = {}
        lengths = [tokens for index in range(admission.batch) for tokens in load.lengths(index)]
        self._mean = sum(lengths) / len(lengths)
        self._context = load.prompt_tokens + self._mean / 2

    @property
    def simulated(self) -> int:
        """Runs so far."""
        return len(self._known)

    def capacity(self, engine_slots: int) -> int:
        """Sequences that an engine can have at one time."""
        return self._places.leaves(engine_slots).engine.capacity

    def forecast(self, choice: Choice) -> Forecast:
        """What a run would be like."""
        if choice not in self._known:
            self._known[choice] = self._simulated(choice)
        return self._known[choice]

    def _simulated(self, choice: Choice) -> Forecast:
        leaves = self._places.leaves(choice.engine_slots)
        speed = dataclasses.replace(
            leaves.engine, step_seconds=leaves.engine.step_seconds[: choice.concurrency + 1]
        )
        admission = dataclasses.replace(self._admission, max_age=choice.max_age)
        world = World(dataclasses.replace(leaves, engine=speed), admission, self._load)
        world.run(admission.max_age + admission.sync_every + 1)
        rows = world.run(self._steps)
        return Forecast.of(choice, rows, num_engines=leaves.num_engines, age_bound=admission.age_bound)

    def worth(self, advised: Choice, most_age: int) -> list[Forecast]:
        """What was simulated of the advised placement and of shared slots, by age."""
        known = [choice for choice in self._known if choice.max_age <= most_age]
        near = [choice for choice in known if choice.engine_slots in (0, advised.engine_slots)]
        full = [choice for choice in near if choice.concurrency == self.capacity(choice.engine_slots)]
        return [self._known[choice] for choice in sorted(full, key=lambda c: (c.engine_slots, c.max_age))]

    # -- the best choice -----------------------------------------------------------------------------------------

    def exhaustive(self, most_age: int) -> Forecast:
        """The best of all choices with at most this age, each simulated."""
        return max(
            (
                self.forecast(Choice(age, slots, concurrency))
                for slots in self._places
                for age in range(most_age + 1)
                for concurrency in _halves(self.capacity(slots))
            ),
            key=lambda found: found.tokens_per_second,
        )

    def advised(self, most_age: int) -> Forecast:
        """A choice within a few percent of the best one, from a fraction of the runs.

        The split from where trainer and engines take equally long at full batches, climbed from there; then the concurrency;
        then the smallest age that is as good. Shared slots are tried beside it. What would not start is left out.
        """
        slots = set(self._places)
        while slots:
            best = self._best_split(sorted(slots), most_age)
            if not self._places.problems(best.choice.engine_slots):
                return self._younger(self._narrower(best))
            slots.discard(best.choice.engine_slots)
        return self._best_split(sorted(self._places), most_age)

    def _best_split(self, slots: list[int], most_age: int) -> Forecast:
        own = [number for number in slots if number]
        found = [self._at(0, most_age)] if 0 in slots else []
        if own:
            start = min(range(len(own)), key=lambda place: self._bound(own[place]))
            found.append(self._climbed(own, start, most_age))
        return max(found, key=lambda each: each.tokens_per_second)

    def _climbed(self, own: list[int], place: int, most_age: int) -> Forecast:
        best = self._at(own[place], most_age)
        for direction in (1, -1):
            nearby = place + direction
            while 0 <= nearby < len(own):
                other = self._at(own[nearby], most_age)
                if other.tokens_per_second <= best.tokens_per_second:
                    break
                best, nearby = other, nearby + direction
            if best.choice.engine_slots != own[place]:
                break
        return best

    def _bound(self, engine_slots: int) -> float:
        """Seconds of a step at least, with engines that are always full."""
        leaves, samples = self._places.leaves(engine_slots), self._admission.batch * self._load.samples
        tokens, speed = samples * self._mean, leaves.engine
        generating = tokens / leaves.num_engines / speed.rate(speed.capacity, self._context)
        return max(generating, leaves.train_seconds(tokens + samples * self._load.prompt_tokens))

    def _narrower(self, best: Forecast) -> Forecast:
        speed = self._places.leaves(best.choice.engine_slots).engine
        for concurrency in _halves(best.choice.concurrency)[1:]:
            if speed.rate(concurrency, self._context) < speed.rate(best.choice.concurrency, self._context):
                return best
            other = self.forecast(dataclasses.replace(best.choice, concurrency=concurrency))
            if other.tokens_per_second <= best.tokens_per_second:
                return best
            best = other
        return best

    def _younger(self, best: Forecast) -> Forecast:
        """The smallest age that is as good."""
        young = best
        for age in reversed(range(best.choice.max_age)):
            other = self.forecast(dataclasses.replace(best.choice, max_age=age))
            if other.tokens_per_second < best.tokens_per_second * (1 - EQUAL):
                break
            young = other
        return young

    def _at(self, engine_slots: int, age: int) -> Forecast:
        return self.forecast(Choice(age, engine_slots, self.capacity(engine_slots)))


def _halves(most: int) -> list[int]:
    """most, half and a quarter of it, each at least 1."""
    return sorted({most, max(1, most // 2), max(1, most // 4)}, reverse=True)
