"""Elastic slots simulated, with the rule that runs use: never much slower than the better fixed split, faster where lengths double in
the middle of a run, and within the bounds of every stream."""

from __future__ import annotations

import itertools

import pytest

from mrl.pool.ledger import Admission, End, State
from mrl.pool.waking import Waking
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import StepTimes, World

SAMPLES, MEAN, STEPS, WARM_UP = 8, 400, 60, 4
HAND_OVER = 0.5
"""Seconds of one hand-over of the trainer's slots, of steps that take 3 to 40."""
DEAR = 4.0
"""Of one that is hardly ever worth it."""


class Doubling(Load):
    """Whose responses are twice as long from some prompt on."""

    def __init__(self, doubles_at: int, prompt_tokens: int) -> None:
        draw = log_normal(SAMPLES, mean=MEAN, sigma=0.6, most=4 * MEAN)
        super().__init__(draw, prompt_tokens=prompt_tokens)
        self._doubles_at = doubles_at

    def lengths(self, index: int) -> list[int]:
        factor = 2 if index >= self._doubles_at else 1
        return [factor * tokens for tokens in super().lengths(index)]


class Case:
    """A workload on `slots` slots: generation of a batch on all of them, training `train_share` of both together, of which
    `fixed_share` gains nothing by more slots."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        fixed_share: float,
        train_share: float,
        *,
        prompt_tokens: int = 100,
        doubles: bool = False,
        hand_over: float = HAND_OVER,
    ) -> None:
        self.hand_over = hand_over
        self.slots, self.speed = slots, EngineSpeed.linear(capacity, 0.02, 2e-4, 2e-8, 2e-5)
        self.admission = Admission(2 * slots, max_age=2)
        samples, context = self.admission.batch * SAMPLES, MEAN // 2 + prompt_tokens
        generating = samples * MEAN / slots / self.speed.rate(capacity, context)
        training = generating * train_share / (1 - train_share)
        self.fixed = training * fixed_share
        self.per_token = (training - self.fixed) / (samples * (MEAN + prompt_tokens))
        middle = self.admission.batch * STEPS // 2
        self.load = Doubling(middle if doubles else 1 << 40, prompt_tokens)

    def leaves(self, own: int, *, elastic: bool = False) -> Leaves:
        """`own` 0: trainer and engines take turns on all slots."""
        if not own:
            return Leaves(
                self.speed,
                self.slots,
                True,
                self.fixed,
                self.per_token,
                sync_seconds=self.hand_over,
                turn_seconds=self.hand_over,
            )
        trainers = self.slots - own
        return Leaves(
            self.speed,
            own,
            False,
            self.fixed,
            self.per_token * self.slots / trainers,
            sync_seconds=0.2,
            park_seconds=0.05,
            num_sleepers=trainers if elastic else 0,
            wake_seconds=self.hand_over,
            give_back_seconds=self.hand_over,
        )

    def rows(self, own: int, *, elastic: bool = False) -> list[StepTimes]:
        return World(self.leaves(own, elastic=elastic), self.admission, self.load).run(STEPS)[WARM_UP:]

    def seconds(self, own: int, *, elastic: bool = False) -> float:
        return sum(row.seconds for row in self.rows(own, elastic=elastic))


GRID = [
    case
    for case in itertools.product((2, 4), (16, 64), (0.0, 0.6), (0.3, 0.5, 0.7))
    if case[0] > 2 or case[3] < 0.7
]
"""Not where training alone, on the one slot of two that is left, takes longer than a step on both: engines lend it nothing."""


@pytest.mark.parametrize("hand_over", [HAND_OVER, DEAR])
@pytest.mark.parametrize(("slots", "capacity", "fixed_share", "train_share"), GRID)
def test_never_much_slower_than_the_better_fixed_split(
    slots: int, capacity: int, fixed_share: float, train_share: float, hand_over: float
) -> None:
    case = Case(slots, capacity, fixed_share, train_share, hand_over=hand_over)
    fixed = {own: case.seconds(own) for own in range(slots)}
    elastic = {own: case.seconds(own, elastic=True) for own in range(1, slots)}
    assert min(elastic.values()) <= 1.03 * min(fixed.values())
    assert all(elastic[own] <= 1.03 * fixed[own] for own in elastic), "waking cost more than it gave"


def test_faster_where_lengths_double_in_the_middle() -> None:
    """Than every fixed split, turns on shared slots among them."""
    case = Case(2, 16, 0.6, 0.5, prompt_tokens=800, doubles=True)
    elastic, fixed = case.seconds(1, elastic=True), [case.seconds(own) for own in (0, 1)]
    assert elastic <= 0.9 * min(fixed), f"{elastic} s against {fixed}"
    woke = [row.awake_seconds for row in case.rows(1, elastic=True)]
    half = len(woke) // 2
    assert sum(woke[half:]) > 2 * sum(woke[:half]), "it woke for the short ones"


def test_ages_and_prompts_are_those_of_every_stream() -> None:
    """The bound holds, each prompt comes once, no token is lost on the way between engines."""
    for capacity, age, every in itertools.product((2, 16), (1, 3), (1, 2)):
        case = Case(4, capacity, 0.3, 0.3, doubles=True)
        admission = Admission(4, max_age=age, sync_every=every)
        world = World(case.leaves(1, elastic=True), admission, case.load)
        rows = world.run(24)
        assert sum(row.awake_seconds for row in rows) > 0
        assert max(age for row in rows for age in row.ages) <= admission.age_bound
        tokens = sum(sum(case.load.lengths(index)) for index in range(24 * admission.batch))
        assert sum(sum(row.ages.values()) for row in rows) == tokens
        taken = world.ledger.ends[End.TRAINED] + len(world.ledger.entries(State.TAKEN))
        assert taken == 24 * admission.batch


def rule(needed: float, hand_overs: float) -> Waking:
    """After a step of `needed` engine-seconds, at time 0."""
    waking = Waking(own=2, sleepers=2, at_once=8)
    waking.work(-needed / 2, 2)
    waking.take(0.0)
    waking.hand_overs = hand_overs
    return waking


def test_waking_pays_where_what_is_left_is_worth_the_hand_overs_twice() -> None:
    waking = rule(20.0, hand_overs=1.5)
    assert waking.left(4.0) == pytest.approx(6.0)
    assert not waking.pays(4.0, 32), "half of 6 seconds, exactly twice what it costs"
    assert waking.pays(3.9, 32) and not waking.pays(4.1, 32)
    assert not waking.pays(3.9, 16) and not waking.pays(3.9, 0), "its own engines run all at once already"
    assert waking.pays(0.0, 24) and not waking.pays(3.9, 24), "a third of them would move"


def test_what_is_overdue_is_expected_to_take_as_long_again() -> None:
    waking = rule(20.0, hand_overs=1.5)
    assert not waking.pays(10.0, 32) and not waking.pays(15.9, 32) and waking.pays(16.1, 32)
    first = Waking(own=1, sleepers=1, at_once=8)
    first.hand_overs = 1.5
    first.work(0.0, 1)
    assert not first.pays(5.9, 16) and first.pays(6.1, 16), "nothing is known of the first step"


def test_work_of_more_engines_counts_as_theirs() -> None:
    waking = rule(20.0, hand_overs=1.0)
    waking.work(1.0, 4)
    waking.work(3.0, 0)
    assert waking.left(9.0) == pytest.approx((20 - 2 - 8) / 2), "nobody works since 3"
    waking.take(9.0)
    assert waking.left(9.0) == pytest.approx((20 + 10) / 2 / 2), "the mean of 20 and 10"
