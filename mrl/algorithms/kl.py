"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

Owns the estimators and their clamp. Not the coefficient and not where the term goes (reward: recipe,
loss: objective). Source: Schulman, "Approximating KL divergence" (2020); k3 as in DeepSeekMath, arXiv 2402.03300.

Choices where frameworks differ:
1. The CLAMP of 10 nats is for every kind.
2. The exponent of k3 is bounded at 80, so that an extreme token gives a huge finite value instead of NaN gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_EXPONENT = 80.0
CLAMP = 10.0
"""Largest absolute estimate of one token, in nats; clamped tokens are counted."""


def estimate_kl(kind: str, difference: Tensor) -> tuple[Tensor, Tensor]:
    """([N] KL estimates per token in nats, [N] bool which of them the clamp changed).

    With d = difference = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The
    estimate is limited to [-CLAMP, CLAMP] and passes no gradient outside.
    """
    values = KINDS[kind](difference)
    return values.clamp(-CLAMP, CLAMP), values.detach().abs() > CLAMP


def _k3(difference: Tensor) -> Tensor:
    exponent = (-difference).clamp(max=_MAX_EXPONENT)
    return torch.expm1(exponent) + difference


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: d.square() / 2,
    "k3": _k3,
}
"""Name to the estimator as a function of logprobs - ref_logprobs."""
