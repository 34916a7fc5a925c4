"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

Owns the estimators and their clamp. Not the coefficient (controllers) and not where the term goes (reward: recipe,
loss: objective). Source: Schulman, "Approximating KL divergence" (2020); k3 as in DeepSeekMath, arXiv 2402.03300.

Choices where frameworks differ:
1. `clamp` is None here (the estimator itself) and 10 in the configuration, for every kind.
2. The exponent of k3 is bounded at 80, so that a wild token gives a huge finite value instead of NaN gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms import checks

_MAX_EXPONENT = 80.0


def estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor, *, clamp: float | None = None) -> Tensor:
    """KL estimate per token in nats, same shape as the inputs ([B, T] or [N]).

    With d = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. With `clamp` the estimate
    is limited to [-clamp, clamp] and passes no gradient outside. ValueError for an unknown kind.
    """
    return estimate_counted(kind, logprobs, ref_logprobs, clamp=clamp)[0]


def estimate_counted(
    kind: str, logprobs: Tensor, ref_logprobs: Tensor, *, clamp: float | None = None
) -> tuple[Tensor, Tensor]:
    """`estimate` and, of the same shape, a bool tensor: which tokens the clamp changed."""
    checks.known(kind, KINDS, "KL kind")
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"ref_logprobs: shape {tuple(ref_logprobs.shape)}, expected that of logprobs {tuple(logprobs.shape)}"
        )
    values = KINDS[kind](logprobs - ref_logprobs)
    if clamp is None:
        return values, torch.zeros_like(values, dtype=torch.bool)
    checks.positive("clamp", clamp)
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
