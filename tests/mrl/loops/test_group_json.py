"""Surplus groups survive a checkpoint unchanged."""

import dataclasses
import datetime
import json

import numpy as np
import pytest

from mrl.errors import CheckpointError
from mrl.loops.group_json import from_json, to_json
from mrl.rewards.instructions.verifier import Check
from mrl.samples import Group, Prompt, Segment, Verdict, VerdictKind
from tests.support.samples import make_sample


def same(left: object, right: object) -> bool:
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_a_group_comes_back_equal_to_the_last_bit() -> None:
    verdict = Verdict(
        VerdictKind.SCORED, 0.1 + 0.2, "why", {"maths": 1.0}, token_values=np.array([0.1, 0.7], np.float32)
    )
    scored = dataclasses.replace(make_sample(3, 0, num_prompt=2, length=2), verdict=verdict)
    row = {"seen": datetime.date(2026, 1, 2), "picture": b"\x00", "a": [1, 2]}
    prompt = Prompt(3, scored.prompt_tokens, "1+1=", Check("no_commas", {}), metadata=row)
    segments = (Segment(0, 1, 6, 0, 0, 1 << 62), Segment(1, 4, 7, 1, 2, 3))
    group = Group(prompt, (scored, make_sample(3, 1, num_prompt=2, length=4, segments=segments)))
    assert same(group, from_json(json.loads(json.dumps(to_json(group))), {3: prompt}.__getitem__))


def test_a_group_of_another_release_says_so() -> None:
    sample = make_sample(3, 0, num_prompt=2, length=2)
    prompt = Prompt(3, sample.prompt_tokens, "1+1=", "2")
    value = to_json(Group(prompt, (sample,)))
    value["samples"][0]["sampler_logprobs"] = value["samples"][0].pop("rollout_logprobs")
    with pytest.raises(CheckpointError, match=r"another release.*sampler_logprobs"):
        from_json(json.loads(json.dumps(value)), {3: prompt}.__getitem__)
