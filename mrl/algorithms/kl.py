"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

Owns the estimators and their clamp. Not the coefficient (controllers) and not where the term goes (reward: recipe,
loss: objective). Source: Schulman, "Approximating KL divergence" (2020); k3 as in DeepSeekMath, arXiv 2402.03300.

Choices where frameworks differ:
1. `clamp` is 10 by default, for every kind.
2. The exponent of k3 is bounded at 80, so that an extreme token gives a huge finite value instead of NaN gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.config.sections.algorithm import KlSection

_MAX_EXPONENT = 80.0


def estimate(section: KlSection, difference: Tensor) -> tuple[Tensor, Tensor]:
    """([N] KL estimates per token in nats, [N] bool which of them the clamp changed).

    With d = difference = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. With a clamp
    the estimate is limited to [-clamp, clamp] and passes no gradient outside.
    """
    values, clamp = KINDS[section.kind](difference), section.clamp
    if clamp is None:
        return values, torch.zeros_like(values, dtype=torch.bool)
    return values.clamp(-clamp, clamp), values.detach().abs() > clamp


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
