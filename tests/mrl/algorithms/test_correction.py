"""Correction weights by hand and by layout; always detached, always measured."""

import math
import typing

import pytest
import torch

from mrl.config.sections.correction import CORRECTION_KINDS
from tests.mrl.algorithms.padded import measure, weights

KINDS = typing.get_args(CORRECTION_KINDS)


def one_token_two_nats_off() -> dict[str, torch.Tensor]:
    """Four tokens, one of them at +2 nats: product 7.389, geometric 1.6487, token 7.389 at one place."""
    rollout = torch.full((1, 4), -3.0, dtype=torch.float64)
    old = rollout.clone()
    old[0, 2] += 2.0
    return {"old_logprobs": old, "rollout_logprobs": rollout, "loss_mask": torch.ones(1, 4)}


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("off", {}, [1, 1, 1, 1]),
        ("truncated", {"low": 0.0, "high": 2.0}, [1, 1, 2, 1]),
        ("truncated", {"low": 1.5, "high": 5.0}, [1.5, 1.5, 5, 1.5]),
        ("icepop", {"low": 0.5, "high": 5.0}, [1, 1, 0, 1]),
        ("icepop", {"low": 0.5, "high": 8.0}, [1, 1, math.exp(2), 1]),
        ("sequence_mask", {"high": 1.6}, [0, 0, 0, 0]),
        ("sequence_mask", {"high": 1.7}, [1, 1, 1, 1]),
        ("sequence_mask", {"high": 1.7, "token_weights": "raw"}, [1, 1, math.exp(2), 1]),
        ("sequence_mask", {"high": 1.7, "token_weights": "truncated", "token_high": 1.6}, [1, 1, 1.6, 1]),
        ("geometric", {"high": 2.0}, [math.exp(0.5)] * 4),
        ("geometric", {"high": 1.2}, [1.2] * 4),
        ("product", {"high": 10.0}, [math.exp(2)] * 4),
        ("product", {"high": 3.0}, [3.0] * 4),
    ],
)
def test_kinds(kind, options, expected) -> None:
    options = {"low": 0.0} | options if kind != "off" else {}
    values = weights(kind, **one_token_two_nats_off(), **options)
    torch.testing.assert_close(values, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=0)


def test_measured_at_every_granularity() -> None:
    metrics = measure(**one_token_two_nats_off())
    assert float(metrics["policy/rollout_weight_token"]) == pytest.approx((3 + math.exp(2)) / 4)
    assert float(metrics["policy/rollout_weight_geometric"]) == pytest.approx(math.exp(0.5))
    assert float(metrics["policy/rollout_weight_product"]) == pytest.approx(math.exp(2))
    assert float(metrics["policy/rollout_difference"]) == pytest.approx(0.5)
    assert float(metrics["policy/rollout_difference_max"]) == pytest.approx(2.0)
    assert float(metrics["policy/rollout_mismatch_kl"]) == pytest.approx((math.exp(2) - 1 - 2) / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_padded_and_no_gradient(kind, batch) -> None:
    def call(part) -> torch.Tensor:
        old = part.arrays["old_logprobs"].clone().requires_grad_()
        return weights(
            kind,
            old_logprobs=old,
            rollout_logprobs=part.arrays["rollout_logprobs"],
            loss_mask=part.mask,
            segment_ids=part.segment_ids,
            **bounds,
        )

    bounds = {} if kind == "off" else {"low": 0.9, "high": 1.1}
    packed = batch.packed()
    padded = call(batch)
    torch.testing.assert_close(packed.unpack(call(packed), batch), padded, atol=1e-12, rtol=0)
    assert not padded.requires_grad
    assert not bool(padded[~batch.mask].any())


def test_bad_input() -> None:
    arguments = one_token_two_nats_off()
    with pytest.raises(ValueError, match="unknown correction 'icepopp': did you mean 'icepop'"):
        weights("icepopp", **arguments)
    with pytest.raises(ValueError, match=r"low = 2.0 must be below correction.high = 1.0"):
        weights("truncated", low=2.0, high=1.0, **arguments)
    with pytest.raises(ValueError, match="rollout_logprobs: -inf in sample 0"):
        weights("off", **(arguments | {"rollout_logprobs": torch.full((1, 4), float("-inf"))}))
    with pytest.raises(ValueError, match="'none', 'raw' or 'truncated'"):
        weights("sequence_mask", token_weights="all", **arguments)
