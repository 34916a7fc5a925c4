"""How parts add up to one verdict."""

import numpy as np

from mrl.rewards.contract import no_reward, rejected, scored
from mrl.rewards.kinds.section import KindPart
from mrl.rewards.pool.tickets import Ticket, combine
from mrl.samples import Verdict, VerdictKind

MATHS = KindPart(kind="maths", weight=1.0)
FORMAT = KindPart(kind="format", weight=0.25)


def test_values_are_weighted_and_named() -> None:
    verdict = combine((MATHS, FORMAT), {"maths": scored(1.0), "format": scored(-2.0, "no tags")})
    assert verdict.kind is VerdictKind.SCORED
    assert verdict.value == 1.0 - 0.5
    assert verdict.parts == {"maths": 1.0, "format": -2.0}
    assert "no tags" in verdict.reason


def test_one_without_reward_part_makes_the_sample_have_none() -> None:
    verdict = combine((MATHS, FORMAT), {"maths": no_reward("down"), "format": scored(1.0)})
    assert (verdict.kind, verdict.value) == (VerdictKind.NO_REWARD, None)


def test_a_part_that_does_not_apply_is_left_out() -> None:
    assert combine((MATHS, FORMAT), {"maths": None, "format": scored(2.0)}).value == 0.5
    assert combine((MATHS, FORMAT), {"maths": None, "format": None}).kind is VerdictKind.NO_REWARD


def test_refused_only_when_all_refuse() -> None:
    assert (
        combine((MATHS, FORMAT), {"maths": rejected("long"), "format": scored(0.0)}).kind
        is VerdictKind.SCORED
    )
    assert (
        combine((MATHS, FORMAT), {"maths": rejected("long"), "format": rejected("x")}).kind
        is VerdictKind.REJECTED
    )


def test_process_rewards_are_summed_with_the_weights() -> None:
    first = Verdict(VerdictKind.SCORED, 1.0, token_values=np.array([1.0, 0.0], np.float32))
    second = Verdict(VerdictKind.SCORED, 1.0, token_values=np.array([4.0, 8.0], np.float32))
    verdict = combine((MATHS, FORMAT), {"maths": first, "format": second})
    assert verdict.token_values is not None
    assert verdict.token_values.tolist() == [2.0, 2.0]


def test_ticket_answers_once_all_parts_have() -> None:
    ticket = Ticket("1.0", (MATHS, FORMAT), num_tokens=2)
    assert ticket.answer("format", scored(1.0)) is None
    verdict = ticket.answer("maths", scored(1.0))
    assert verdict is not None and verdict.value == 1.25
