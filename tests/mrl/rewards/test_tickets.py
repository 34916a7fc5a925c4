"""Parts are combined into one verdict."""

from typing import Any

import numpy as np
import pytest

from mrl.rewards.contract import no_reward, rejected, scored
from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.pool.tickets import SampleScore, weighted_verdict
from mrl.samples import Verdict, VerdictKind

MATHS = KindPart(kind="maths", weight=1.0)
FORMAT = KindPart(kind="format", weight=0.25)


def test_values_are_weighted_and_named() -> None:
    verdict = weighted_verdict((MATHS, FORMAT), {"maths": scored(1.0), "format": scored(-2.0, "no tags")})
    assert verdict.kind is VerdictKind.SCORED
    assert verdict.value == 1.0 - 0.5
    assert verdict.parts == {"maths": 1.0, "format": -2.0}
    assert "no tags" in verdict.reason


def test_one_without_reward_part_makes_the_sample_have_none() -> None:
    verdict = weighted_verdict((MATHS, FORMAT), {"maths": no_reward("down"), "format": scored(1.0)})
    assert (verdict.kind, verdict.value) == (VerdictKind.NO_REWARD, None)


def test_a_part_that_does_not_apply_is_left_out() -> None:
    assert weighted_verdict((MATHS, FORMAT), {"maths": None, "format": scored(2.0)}).value == 0.5
    assert weighted_verdict((MATHS, FORMAT), {"maths": None, "format": None}).kind is VerdictKind.NO_REWARD


def test_refused_only_when_all_refuse() -> None:
    assert (
        weighted_verdict((MATHS, FORMAT), {"maths": rejected("long"), "format": scored(0.0)}).kind
        is VerdictKind.SCORED
    )
    assert (
        weighted_verdict((MATHS, FORMAT), {"maths": rejected("long"), "format": rejected("x")}).kind
        is VerdictKind.REJECTED
    )


def test_process_rewards_are_summed_with_the_weights() -> None:
    """A token without a reward from one part keeps the other part's."""
    nan = np.nan
    first = Verdict(VerdictKind.SCORED, 1.0, token_values=np.array([1.0, 0.0, nan, nan], np.float32))
    second = Verdict(VerdictKind.SCORED, 1.0, token_values=np.array([4.0, 8.0, 4.0, nan], np.float32))
    verdict = weighted_verdict((MATHS, FORMAT), {"maths": first, "format": second})
    assert verdict.token_values is not None
    np.testing.assert_array_equal(verdict.token_values, [2.0, 2.0, 1.0, nan])


def test_ticket_answers_once_all_parts_have() -> None:
    ticket = SampleScore("1.0", (MATHS, FORMAT), num_tokens=2)
    assert ticket.record("format", scored(1.0)) is None
    verdict = ticket.record("maths", scored(1.0))
    assert verdict is not None and verdict.value == 1.25


GATE = KindPart(kind="format", weight=0.25, gate=1.0)
WITNESS = KindPart(kind="instructions", weight=0.0, share=0.25)


def test_a_closed_gate_keeps_the_others_from_being_asked() -> None:
    ticket = SampleScore("1.0", (KindPart(kind="maths", min_reward=-2.0), GATE), num_tokens=2)
    assert [part.label for part in ticket.begin()] == ["format"]
    verdict = ticket.record("format", scored(0.5))
    assert verdict is not None and verdict.value == -2.0 + 0.125 and not ticket.opened()
    assert "format is a gate and closed" in verdict.reason


def test_an_open_gate_hands_on_once_all_gates_are_open() -> None:
    second = KindPart(kind="repetition", gate=0.0)
    ticket = SampleScore("1.0", (MATHS, GATE, second), num_tokens=2)
    assert [part.label for part in ticket.begin()] == ["format", "repetition"]
    assert ticket.record("format", scored(1.0)) is None and not ticket.opened()
    assert ticket.record("repetition", scored(0.0)) is None
    assert [part.label for part in ticket.opened()] == ["maths"] and not ticket.opened()
    verdict = ticket.record("maths", scored(1.0))
    assert verdict is not None and verdict.value == 1.25


def test_two_gates_of_which_one_is_closed_give_one_verdict() -> None:
    ticket = SampleScore("1.0", (MATHS, GATE, KindPart(kind="repetition", gate=0.0)), num_tokens=2)
    ticket.begin()
    assert ticket.record("format", scored(0.0)) is None, "the other gate has not answered yet"
    assert ticket.record("repetition", scored(0.0)) is not None


def test_a_gate_that_failed_leaves_the_sample_without_a_reward() -> None:
    ticket = SampleScore("1.0", (MATHS, GATE), num_tokens=2)
    ticket.begin()
    verdict = ticket.record("format", no_reward("down"))
    assert verdict is not None and verdict.value is None


def test_a_witness_looks_at_its_share_and_decides_nothing() -> None:
    looked = 0
    for number in range(2000):
        ticket = SampleScore(f"{number}.0", (MATHS, WITNESS), num_tokens=2)
        chosen = ticket.begin()
        assert [part.label for part in SampleScore(f"{number}.0", (MATHS, WITNESS), 2).begin()] == [
            p.label for p in chosen
        ]
        looked += WITNESS in chosen
    assert 420 < looked < 580
    parts = (MATHS, WITNESS)
    assert weighted_verdict(parts, {"maths": scored(1.0), "instructions": no_reward("down")}).value == 1.0
    assert (
        weighted_verdict(parts, {"maths": rejected("x"), "instructions": scored(1.0)}).kind
        is VerdictKind.REJECTED
    )
    assert weighted_verdict(parts, {"maths": None, "instructions": scored(1.0)}).value is None
    assert (
        weighted_verdict(parts, {"maths": scored(1.0), "instructions": scored(0.0)}).parts["instructions"]
        == 0.0
    )


def test_a_witness_reads_the_same_answer_as_the_judge_beside_it() -> None:
    judge = {"kind": "llm", "path": "http://judge"}
    section = RewardSection.model_validate({"parts": [judge, {"kind": "maths", "weight": 0.0}]})
    truths = parse_ground_truth("12", domain="x", section=section, place="f:1")
    assert truths["llm"] == "12" and truths["maths"] is not None


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([{"kind": "maths"}, {"kind": "format", "share": 0.5}], "share below 1 needs weight = 0 and no gate"),
        ([{"kind": "maths", "gate": 1.0}, {"kind": "format", "gate": 1.0}], "gate is set on every verifier"),
        ([{"kind": "maths", "gate": 1.0}, {"kind": "plugin", "path": "a:b", "group": True}],
         "scored as a whole"),
        ([{"kind": "maths", "weight": 0.0}], "nothing gives a reward"),
    ],
)  # fmt: skip
def test_gates_and_witnesses_that_decide_nothing_are_refused(parts: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RewardSection.model_validate({"parts": parts})
