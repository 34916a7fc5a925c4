"""Groups that differ in every field of a sample, and a comparison of all fields."""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.samples import Group, Prompt, ResponseSegment, Status
from tests.support.samples import make_sample, verdict_of


def prompt_at(index: int) -> Prompt:
    return Prompt(index, np.arange(index % 5, dtype=np.int32), "", None)


def group_of(index: int, *, num_samples: int = 4, tokens: int = 50) -> Group:
    """Return a group that differs from others by `index` in every field."""
    rng = np.random.default_rng(index)
    samples = []
    for number in range(num_samples):
        length = int(rng.integers(0, 2 * tokens))
        half = length // 2
        verdict = dataclasses.replace(
            verdict_of(float(number)),
            parts={"format": 0.5},
            token_values=rng.random(length, np.float32) if number == 1 else None,
        )
        samples.append(
            make_sample(
                index,
                number,
                response_tokens=rng.integers(0, 1 << 17, length).astype(np.int32),
                loss_mask=rng.random(length) < 0.9,
                rollout_logprobs=rng.standard_normal(length).astype(np.float32),
                policy_versions=np.repeat([3, 4], [half, length - half]).astype(np.int32),
                status=list(Status)[number % 3],
                response_text="Ü🙂" * number,
                segments=(ResponseSegment(0, half, 3, 0, 1, 2**63 + 5),) if half else (),
                verdict=verdict if number else None,
            )
        )
    return Group(prompt_at(index), tuple(samples))


def assert_same(actual: object, expected: object) -> None:
    """Assert equality of every field, including dtype and shape of arrays."""
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple) and expected and dataclasses.is_dataclass(expected[0]):
        assert isinstance(actual, tuple) and len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray) and actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected
