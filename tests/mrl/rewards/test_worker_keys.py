"""Verifiers share workers if and only if their workers would do the same."""

import json
from typing import Any

import pytest

from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.registry import KINDS, reward_kind
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.reward_part import RewardPart
from tests.support.judge_server import judge_server

TASK = json.dumps({"fn_name": "f", "inputs": [[0], [1]], "outputs": [0, 5]})
CHECKS = [{"check": "no_commas"}, {"check": "num_words", "relation": "at_least", "count": 9}]
CASES: dict[str, tuple[Any, str, dict[str, Any], float, float]] = {
    "maths": ("42", "\\boxed{42.1}", {"relative_tolerance": 0.1}, 0.0, 1.0),
    "code": (TASK, "```python\ndef f(x): return x\n```", {"partial": True}, 0.0, 0.5),
    "instructions": (CHECKS, "one", {"partial": True}, 0.0, 0.5),
    "format": (None, "<a>x</a>", {"tags": ["a"]}, 0.0, 1.0),
    "repetition": (None, "a a a a", {"ngram": 1}, 0.0, -0.75),
    "llm": ("12", "The sum is 12.", {"choices": {"no": 0.0, "yes": 3.0}}, 1.0, 3.0),
}
"""Kind -> a row's answer, a response, rules, the value without these rules, the value by them."""

OF_NO_WORKER = {"name", "weight", "gate", "share", "reject_truncated"}


@pytest.mark.parametrize("first", ["usual", pytest.param("own", marks=pytest.mark.slow)])
def test_verifiers_of_one_kind_with_other_rules_have_workers_of_their_own(
    first: str, make_pair: Any, score_all: Any
) -> None:
    """Usual and custom rules of every kind, as two domains and as two parts of one, in both orders."""
    with judge_server() as (url, _, _):
        domains: dict[str, Any] = {}
        for kind, (_, _, rules, _, _) in CASES.items():
            usual: dict[str, Any] = {"kind": kind} | ({"path": url} if kind == "llm" else {})
            custom = usual | {kind: usual.get(kind, {}) | rules}
            both = [usual | {"name": "usual"}, custom | {"name": "own"}]
            domains |= {
                f"{kind} usual": usual,
                f"{kind} own": custom,
                f"{kind} parts": {"parts": both if first == "usual" else both[::-1]},
            }
        section = RewardSection.model_validate({"domains": domains, "workers": 1, "deadline_seconds": 60.0})
        expected, pairs = {}, []
        for kind, (answer, response, _, by_usual, by_own) in CASES.items():
            values = {
                "usual": {"": by_usual},
                "own": {"": by_own},
                "parts": {"usual": by_usual, "own": by_own},
            }
            for case in (first, *(values.keys() - {first})):
                domain, number = f"{kind} {case}", len(pairs)
                raw = {"usual": answer, "own": answer} if case == "parts" and answer is not None else answer
                truth = parse_ground_truth(raw, domain=domain, section=section, place="f:1")
                pairs.append(make_pair(number, response, truth, domain=domain))
                expected[domain] = values[case]
        with RewardPool(section) as pool:
            verdicts = score_all(pool, pairs)
    by_domain = {p.domain: verdicts[s.sample_id] for s, p in pairs}
    for domain, values in expected.items():
        verdict = by_domain[domain]
        assert {name: verdict.parts.get(name, verdict.value) for name in values} == values, (domain, verdict)


def _changed(section: Any, name: str) -> Any:
    return section.model_copy(update={name: "another value"})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_a_worker_is_in_its_key(kind: str) -> None:
    """A new setting is in the key, or is listed above as unused by workers."""
    part = KindPart.model_construct(kind=kind)
    key = reward_kind(part).worker_key()
    settings = set(RewardPart.model_fields) - {"kind"}
    assert {n for n in settings if reward_kind(_changed(part, n)).worker_key() == key} == OF_NO_WORKER
    for rule in KINDS[kind].rules_section.model_fields:
        other = part.model_copy(update={kind: _changed(getattr(part, kind), rule)})
        assert reward_kind(other).worker_key() != key, rule
    others = set(KindPart.model_fields) - set(RewardPart.model_fields) - {kind}
    assert all(reward_kind(_changed(part, n)).worker_key() == key for n in others), "rules of other kinds"
