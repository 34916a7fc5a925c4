"""A new kind of reward is one class, its section and one entry of the registry; every kind that can be named is there."""

from typing import Any, Literal, get_args

import pytest

from mrl.config.sections.base import Section
from mrl.config.sections.reward import Kind, RewardSection
from mrl.errors import DataError
from mrl.rewards.contract import Request, RewardKind, Stage, scored
from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.registry import KINDS
from mrl.rewards.pool.pool import RewardPool, try_verifiers
from mrl.samples import Verdict


class VowelRules(Section):
    each: float = 1.0


class VowelSection(RewardSection):
    kind: Literal["vowels"] | None = None  # type: ignore[assignment]
    vowels: VowelRules = VowelRules()


class Vowels(RewardKind):
    """Counts vowels in two stages: the first, in batches, leaves long responses to the second."""

    needs_ground_truth = True
    stages = (Stage("short", batch_size=8), Stage("long", in_child=True, keeps_deadline=True))

    def verifier(self, stage: Stage) -> "VowelVerifier":
        return VowelVerifier(self.rules, short=stage.name == "short")

    def parse_ground_truth(self, raw: Any, *, place: str) -> int:
        if not str(raw).isdigit():
            raise DataError(f"{place}: {raw!r} is no number of vowels")
        return int(raw)


class VowelVerifier:
    name, version = "vowels", "1"

    def __init__(self, rules: VowelRules, *, short: bool) -> None:
        self._rules, self._short = rules, short

    async def score(self, request: Request) -> Verdict | None:
        if self._short and len(request.response) > 8:
            return None
        right = sum(letter in "aeiou" for letter in request.response) == request.ground_truth
        return scored(self._rules.each * right, "short" if self._short else "long")


def test_a_kind_is_one_class_and_one_registration(
    make_pair: Any, score_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "vowels", Vowels)
    section = VowelSection.model_validate({"kind": "vowels", "vowels": {"each": 2.0}, "workers": 1})
    truths = [parse_ground_truth(raw, domain="x", section=section, place="f:1") for raw in ("2", 5)]
    with pytest.raises(DataError, match="f:1: 'two' is no number of vowels"):
        parse_ground_truth("two", domain="x", section=section, place="f:1")
    with pytest.raises(DataError, match="no ground truth, and the verifier 'vowels' needs one"):
        parse_ground_truth(None, domain="x", section=section, place="f:1")
    pairs = [
        make_pair(0, "aside", truths[0]),
        make_pair(1, "an education", truths[1]),
        make_pair(2, "sea", truths[0]),
    ]
    try_verifiers(section, [pairs[0][1]])
    with RewardPool(section) as pool:
        verdicts = score_all(pool, pairs)
    seen = [(verdicts[f"{n}.0"].value, verdicts[f"{n}.0"].reason) for n in range(3)]
    assert seen == [(0.0, "short"), (0.0, "long"), (2.0, "short")]


def test_every_kind_that_the_settings_name_is_registered() -> None:
    assert set(get_args(Kind)) == set(KINDS)
