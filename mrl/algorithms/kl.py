"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

Owns the estimators and their clamp. The coefficient and the term's place (reward: recipe, loss: objective)
are elsewhere. Source: Schulman, "Approximating KL divergence" (2020); k3 as in DeepSeekMath, arXiv
2402.03300.

Choices where frameworks differ:
1. The CLAMP of 10 nats applies to every kind.
2. The exponent of k3 is at most 80, so that an extreme token gives a huge finite value instead of NaN
   gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_EXPONENT = 80.0
CLAMP = 10.0
"""Largest absolute estimate of one token, in nats; clamped tokens are counted."""


def estimate_kl(kind: str, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([N] KL estimates per token in nats, [N] bool: changed by the clamp).

    With d = difference = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    Estimates are clamped to [-CLAMP, CLAMP] and have no gradient outside.
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
"""Name to estimator of logprobs - ref_logprobs."""
