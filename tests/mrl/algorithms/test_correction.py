"""Correction weights by hand and by layout; always detached, always measured."""

import math
import typing

import pytest
import torch

from mrl.algorithms.losses import gradient_frac
from mrl.config.sections.correction import CORRECTION_KINDS
from tests.mrl.algorithms.padded import bounds_of, measure, policy_loss, weights

KINDS = typing.get_args(CORRECTION_KINDS)


def one_token_two_nats_off() -> dict[str, torch.Tensor]:
    """Return four tokens, one at +2 nats: geometric 1.6487, token 7.389 in one place."""
    rollout = torch.full((1, 4), -3.0, dtype=torch.float64)
    old = rollout.clone()
    old[0, 2] += 2.0
    return {"old_logprobs": old, "rollout_logprobs": rollout, "loss_mask": torch.ones(1, 4)}


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("off", {}, [1, 1, 1, 1]),
        ("truncated", {"high": 2.0}, [1, 1, 2, 1]),
        ("icepop", {"low": 0.5, "high": 5.0}, [1, 1, 0, 1]),
        ("icepop", {"low": 0.5, "high": 8.0}, [1, 1, math.exp(2), 1]),
        ("sequence_mask", {"low": 0.0, "high": 1.6}, [0, 0, 0, 0]),
        ("sequence_mask", {"low": 0.0, "high": 1.7}, [1, 1, 1, 1]),
        ("sequence_mask", {"low": 0.0, "high": 1.7, "token_weights": "raw"}, [1, 1, math.exp(2), 1]),
        ("sequence_mask", {"low": 0.0, "high": 1.7, "token_weights": "truncated"}, [1, 1, 2, 1]),
        ("geometric", {"high": 2.0}, [math.exp(0.5)] * 4),
        ("geometric", {"high": 1.2}, [1.2] * 4),
    ],
)
def test_kinds(kind, options, expected) -> None:
    values = weights(kind, **one_token_two_nats_off(), **options)
    torch.testing.assert_close(values, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=0)


def test_measured_at_every_granularity() -> None:
    metrics = measure(**one_token_two_nats_off())
    assert float(metrics["policy/rollout_weight_token"]) == pytest.approx((3 + math.exp(2)) / 4)
    assert float(metrics["policy/rollout_weight_geometric"]) == pytest.approx(math.exp(0.5))
    assert float(metrics["policy/rollout_difference"]) == pytest.approx(0.5)
    assert float(metrics["policy/rollout_difference_max"]) == pytest.approx(2.0)
    assert float(metrics["policy/rollout_mismatch_kl"]) == pytest.approx((math.exp(2) - 1 - 2) / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_no_gradient_and_are_0_off_the_mask(kind, batch) -> None:
    correction = weights(
        kind,
        old_logprobs=batch.arrays["old_logprobs"].clone().requires_grad_(),
        rollout_logprobs=batch.arrays["rollout_logprobs"],
        loss_mask=batch.mask,
        **bounds_of(kind, low=0.9, high=1.1),
    )
    assert not correction.requires_grad
    assert not bool(correction[~batch.mask].any())


def test_bad_input() -> None:
    arguments = one_token_two_nats_off()
    with pytest.raises(ValueError, match="unknown correction 'icepopp': did you mean 'icepop'"):
        weights("icepopp", **arguments)
    with pytest.raises(ValueError, match=r"low = 2.0 must be below correction.high = 1.0"):
        weights("icepop", low=2.0, high=1.0, **arguments)
    with pytest.raises(ValueError, match="rollout_logprobs: -inf in sample 0"):
        weights("off", **(arguments | {"rollout_logprobs": torch.full((1, 4), float("-inf"))}))
    with pytest.raises(ValueError, match="'none', 'raw' or 'truncated'"):
        weights("sequence_mask", token_weights="all", **arguments)


def long_responses(length: int, *, sequences: int = 16) -> dict[str, torch.Tensor]:
    """Return responses whose log w deviates by 0.05, with a mean weight of 1, as sampling makes them."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(sequences, length, generator=draw, dtype=torch.float64)
    rollout = torch.full((sequences, length), -1.0, dtype=torch.float64)
    return {
        "old_logprobs": rollout + 0.05 * noise - 0.05**2 / 2,
        "rollout_logprobs": rollout,
        "loss_mask": torch.ones(sequences, length),
    }


def gradient_of(
    arrays: dict[str, torch.Tensor], applied: torch.Tensor, aggregation: str
) -> tuple[torch.Tensor, dict]:
    """Return the loss's gradient by log-probs with these weights, and its metrics."""
    advantages = torch.linspace(-1.0, 2.0, len(arrays["loss_mask"]), dtype=torch.float64)[:, None]
    logprobs = arrays["old_logprobs"].clone().requires_grad_()
    loss, metrics = policy_loss(
        "ppo_clip",
        logprobs=logprobs,
        old_logprobs=arrays["old_logprobs"],
        advantages=advantages.expand_as(logprobs).contiguous(),
        loss_mask=arrays["loss_mask"],
        weights=applied,
        aggregation=aggregation,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient, gradient_frac({name: float(value) for name, value in metrics.items()})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kind", ["truncated", "icepop", "sequence_mask", "geometric"])
def test_what_a_correction_leaves_of_the_gradient_is_reported(kind: str, aggregation: str) -> None:
    arrays = long_responses(64)
    arrays["loss_mask"][3:, 40:] = 0
    applied = weights(kind, **arrays, **bounds_of(kind, low=0.998, high=1.002))
    whole, _ = gradient_of(arrays, torch.ones_like(applied), aggregation)
    left, metrics = gradient_of(arrays, applied, aggregation)
    mask = arrays["loss_mask"].bool()
    expected = float(left.norm() / whole.norm())
    assert metrics["policy/correction_gradient_frac"] == pytest.approx(expected, rel=1e-12)
    assert metrics["policy/correction_weight"] == pytest.approx(float(applied[mask].mean()), rel=1e-12)
    dropped = float((applied[mask] == 0).double().mean())
    assert metrics["policy/correction_dropped_frac"] == pytest.approx(dropped, rel=1e-12)
    assert (dropped > 0) == (kind in ("icepop", "sequence_mask"))
    assert not [name for name in metrics if name.endswith("_squares")]


def test_nothing_is_reported_of_a_correction_that_is_off() -> None:
    arrays = long_responses(8)
    logprobs = arrays["old_logprobs"].clone().requires_grad_()
    advantages = torch.ones_like(logprobs)
    _, metrics = policy_loss(
        "ppo_clip", logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=advantages,
        loss_mask=arrays["loss_mask"],
    )  # fmt: skip
    assert not [name for name in metrics if "correct" in name]
