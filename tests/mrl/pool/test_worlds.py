"""Staleness, exactly-once training and no deadlock in random worlds; broken ledgers are detected."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrl.pool.ledger import Admission, GroupEnd, GroupLedger, GroupState
from tests.mrl.pool.worlds import Settings, World


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_world_keeps_its_promises(count: int) -> None:
    batches = 0
    for seed in range(count):
        world = World(Settings.draw(seed))
        world.run()
        batches += len(world.batches)
    assert batches > 5 * count, "the worlds are too short to show anything"


class FreedTooSoon(GroupLedger):
    """Frees a group's slot when the group is taken."""

    def take(self, indices: list[int], *, version: int) -> list[int]:
        handles = super().take(indices, version=version)
        self.commit(version + 1)
        return handles


class ByFinishingTime(GroupLedger):
    """Orders kept groups by the time of their verdicts."""

    def keep(self, index: int, handle: int) -> None:
        super().keep(index, handle)
        kept = {e.index: e for e in self.entries(GroupState.KEPT)}
        self._entries = kept | {i: e for i, e in self._entries.items() if i not in kept}


class OneTooMany(Admission):
    @property
    def slots(self) -> int:
        return Admission.slots.fget(self) + 1  # type: ignore[attr-defined]


class Forgetful(GroupLedger):
    """Gives a step's groups to the next step again."""

    def take(self, indices: list[int], *, version: int) -> list[int]:
        handles = super().take(indices, version=version)
        for index in indices[-1:]:
            self._move(index, GroupState.TAKEN, GroupState.KEPT)
        return handles


FAULTS = {
    "a slot freed before the commit": (FreedTooSoon, Admission, "versions old"),
    "one slot too many": (GroupLedger, OneTooMany, "versions old"),
    "order by finishing time": (ByFinishingTime, Admission, "versions old|order of training"),
    "a group taken twice": (Forgetful, Admission, "twice"),
}


@pytest.mark.parametrize(("ledger", "admission", "message"), FAULTS.values(), ids=FAULTS)
def test_the_worlds_see_a_fault(ledger: type[GroupLedger], admission: type[Admission], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_worlds(300, ledger, admission)


def run_worlds(count: int, ledger: type[GroupLedger], admission: type[Admission]) -> None:
    for seed in range(count):
        settings = Settings.draw(seed)
        World(settings, ledger(), admission(**dataclasses.asdict(settings.admission))).run()


def test_length_decides_nothing() -> None:
    """Groups train in the order of their prompts, even if short groups finish first."""
    for seed in range(40):
        world = World(dataclasses.replace(Settings.draw(seed), tail=1.0))
        world.run()
        taken = [index for batch in world.batches for index in batch]
        assert taken == sorted(taken)
        if len(taken) > 8:
            position = [world.finish_order.index(index) for index in taken]
            assert position != sorted(position), "nobody finished out of order: the world shows nothing"


def test_a_ready_group_waits_for_those_before_it() -> None:
    ledger = GroupLedger()
    ledger.admit(4, version=0)
    for index in (1, 2):
        ledger.keep(index, handle=index)
    assert ledger.batch(2) == []
    ledger.keep(0, handle=0)
    assert ledger.batch(2) == [0, 1] and ledger.batch(9) == [0, 1, 2]
    ledger.take([0, 1], version=0)
    assert ledger.batch(2) == [2]


def test_a_spent_budget_ends_in_fewer_groups_when_nobody_is_on_the_way() -> None:
    ledger, admission = GroupLedger(), Admission(batch=2, max_dropped=1)
    ledger.admit(admission.room(ledger), version=0)
    ledger.drop(0, GroupEnd.FILTERED)
    assert admission.room(ledger) == 1 and admission.next_batch(ledger) is None
    (index,) = ledger.admit(1, version=0)
    ledger.drop(index, GroupEnd.FILTERED)
    assert admission.room(ledger) == 0 and admission.next_batch(ledger) is None, "group 1 is on its way"
    ledger.keep(1, handle=0)
    assert admission.next_batch(ledger) == [1]
    ledger.take([1], version=0)
    assert admission.room(ledger) == 0, "a short step holds the slots of a whole one"
    assert ledger.commit(0) == [] and ledger.commit(1) == [0] and admission.room(ledger) == 2


def test_ages_of_the_bound() -> None:
    bounds = [
        Admission(batch=4, max_staleness=age, sync_every=steps).staleness_bound
        for age, steps in ((0, 1), (2, 1), (1, 3))
    ]
    assert bounds == [0, 2, 3]
    assert np.all(np.diff([Admission(batch=4, max_staleness=a).slots for a in range(4)]) == 4)
