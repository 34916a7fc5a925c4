"""Random worlds around the real ledger and admission, with simulated engines, verifiers and trainer."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter

from mrl.pool.ledger import Admission, GroupEnd, GroupLedger, GroupState


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int
    admission: Admission
    shared: bool
    """Engines pause while the trainer works."""
    filtered: float
    """Share of the groups that the filter drops."""
    steps: int
    tail: float
    """Exponent of the lengths; the smaller the longer the tail."""

    @classmethod
    def draw(cls, seed: int) -> Settings:
        dice = random.Random(seed)
        batch = dice.randint(1, 6)
        return cls(
            seed,
            Admission(
                batch=batch,
                max_staleness=dice.randint(0, 6),
                sync_every=dice.choice([1, 1, 2, 3]),
                max_dropped=dice.choice([0, batch, 10 * batch]),
            ),
            shared=dice.random() < 0.5,
            filtered=dice.choice([0.0, dice.uniform(0, 0.9)]),
            steps=dice.randint(4, 12),
            tail=dice.choice([1.0, 3.0]),
        )


class World:
    """Runs until its last step; raises AssertionError if a bound is broken or nothing moves."""

    def __init__(
        self, settings: Settings, ledger: GroupLedger | None = None, admission: Admission | None = None
    ) -> None:
        self._settings, self._dice = settings, random.Random(settings.seed)
        self.ledger, self.admission = ledger or GroupLedger(), admission or settings.admission
        self.trained_version = self.served_version = 0
        self._left: dict[int, int] = {}
        """Tokens that a group's longest sample still needs."""
        self._oldest: dict[int, int] = {}
        """Version of the oldest token of each group."""
        self._judging: dict[int, int] = {}
        """Ticks until the verdicts of a group."""
        self._busy: int | None = None
        """Ticks that the trainer still needs; None while it waits."""
        self.batches: list[list[int]] = []
        self.lengths: dict[int, int] = {}
        self.finish_order: list[int] = []
        self._gone: Counter[int] = Counter()

    def run(self) -> None:
        ticks = 0
        while self.trained_version < self._settings.steps:
            before = self._moved()
            self.tick()
            ticks += 1
            assert ticks < 100_000 and (self._moved() != before or self._is_alive()), (
                f"deadlock: {self._settings}"
            )
        self.check()

    def _moved(self) -> tuple[int, ...]:
        return (self.trained_version, self.served_version, self.ledger.next_index, self.ledger.num_in_flight)

    def _is_alive(self) -> bool:
        return bool(self._left or self._judging or self._busy is not None)

    def tick(self) -> None:
        resting = self._settings.shared and self._busy is not None
        if not resting:
            self._admit()
            self._generate()
        self._judge()
        self._train()
        if self._dice.random() < 0.02:
            self._resume()

    def _admit(self) -> None:
        for index in self.ledger.admit(self.admission.room(self.ledger), version=self.served_version):
            self.lengths[index] = self._left[index] = (
                1 + int(self._dice.paretovariate(self._settings.tail)) % 60
            )
            if self._dice.random() < 0.1:
                self._left[index] += self.lengths[index] // 2  # a sample is started over

    def _generate(self) -> None:
        for index in list(self._left):
            if self._dice.random() < 0.3:
                continue  # its engine is busy with others
            self._oldest.setdefault(index, self.served_version)
            self._left[index] -= self._dice.randint(1, 4)
            if self._left[index] <= 0:
                del self._left[index]
                self.finish_order.append(index)
                self._judging[index] = self._dice.randint(0, 5)

    def _judge(self) -> None:
        for index in list(self._judging):
            self._judging[index] -= 1
            if self._judging[index] >= 0:
                continue
            del self._judging[index]
            fate = self._fate(index)
            if fate is None:
                self.ledger.keep(index, handle=index)
            else:
                self._gone[index] += 1
                self.ledger.drop(index, fate)

    def _fate(self, index: int) -> GroupEnd | None:
        """Return a group's end, which depends only on its prompt and never on time."""
        dice = random.Random(f"{self._settings.seed}.{index}").random()
        if dice < self._settings.filtered:
            return GroupEnd.FILTERED
        return GroupEnd.GIVEN_UP if dice > 0.97 else None

    def _train(self) -> None:
        if self._busy is None:
            indices = self.admission.next_batch(self.ledger)
            if indices is None:
                return
            self.batches.append(indices)
            self._gone.update(indices)
            self.ledger.take(indices, version=self.trained_version)
            self._check_ages(indices)
            self._busy = self._dice.randint(0, 12)
        elif self._busy > 0:
            self._busy -= 1
        else:
            self._end_step()

    def _check_ages(self, indices: list[int]) -> None:
        bound = self._settings.admission.staleness_bound
        for index in indices:
            age = self.trained_version - self._oldest[index]
            assert age <= bound, (
                f"group {index} is {age} versions old, the bound is {bound}: {self._settings}"
            )

    def _end_step(self) -> None:
        self.trained_version += 1
        due = self.admission.sync_due(self.ledger, shared=self._settings.shared)
        if due or self._dice.random() < 0.1:  # a checkpoint or a validation syncs too
            self.served_version = self.trained_version
            self.ledger.commit(self.served_version)
        self._busy = None

    def _resume(self) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger.restore(state)
        assert self.ledger.state() == state

    def check(self) -> None:
        """Check the order of groups, and that each prompt ends exactly once."""
        taken = [index for batch in self.batches for index in batch]
        alive = {e.index for e in self.ledger.entries(GroupState.IN_PROGRESS, GroupState.KEPT)}
        assert set(self._gone.values()) <= {1}, "a group was trained or dropped twice"
        assert alive | set(self._gone) == set(range(self.ledger.next_index)) and not alive & set(self._gone)
        for fate in (GroupEnd.FILTERED, GroupEnd.GIVEN_UP):
            dropped = sum(self._fate(index) is fate for index in self._gone)
            assert self.ledger.ends[fate] == dropped
        kept = [index for index in range(max(taken, default=-1) + 1) if self._fate(index) is None]
        assert taken == kept, "the order of training depends on more than indices and verdicts"
        assert self.admission.used(self.ledger) <= self._settings.admission.slots
