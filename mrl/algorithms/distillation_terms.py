"""Distillation on the policy's own samples: a token's term from what policy and teacher gave it.

Owns the formulas and their clip. Not whose teacher a sample has (the loop), and not the teacher's passes (training).

With pi the policy's and T the teacher's probabilities after one prefix, and a token v that the policy sampled there, the
gradient of a divergence D is E_pi[dD/dpi(v) * grad log pi(v)]. So -dD/dpi(v) is the token's advantage, up to a constant,
whose mean effect is 0. With r = T(v) / pi(v), s the teacher's share and m = s * r + 1 - s:

| divergence | D | advantage | estimate of D from v |
|---|---|---|---|
| reverse | KL(pi to T) = E_pi[-log r] | log r | -log r |
| forward | KL(T to pi) = E_pi[r log r] | r - 1 | r log r - (r - 1) |
| jsd | s KL(T to M) + (1 - s) KL(pi to M), M = s T + (1 - s) pi | (1 - s) log m | s r log r - m log m |

The estimates are unbiased; that of jsd is >= 0 token by token, as that of the forward KL. Sources: on-policy distillation as
the policy gradient of the reverse KL (arXiv 2306.08543, and thinkingmachines.ai/blog/on-policy-distillation); the generalised
divergence as in GKD, arXiv 2306.13649, whose beta is our teacher's share.

Choices where frameworks differ:
1. Divergences are named by the gradient that trains. k3 as a loss, which others call a reverse KL, has the forward KL's.
2. A term counts for its own token alone: it is added after the estimator, without discount and without whitening.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.tokens import MAX_LOG_RATIO
from mrl.config.sections.distillation import DistillationSection
from mrl.samples import TrainBatch

TEACHER = "teacher"
"""Of TrainBatch.samples: [B] int64, which of DistillationSection.folders teaches the sample; -1 where none does."""
CLIP = 10.0
"""Largest absolute term of one sampled token before its weight; those changed are counted."""


def join_advantages(
    section: DistillationSection, batch: TrainBatch, advantages: np.ndarray
) -> tuple[np.ndarray, dict[str, float]]:
    """([N] float32 advantages with the teachers' terms, metrics); `advantages` [N] float32 are the rewards'.

    Divergences of distributions are a term of the loss (objective.py): nothing joins the rewards' advantages, or their place with `alone`.
    For sampled ones the batch has `teacher_logprobs`, and says of each sample whose they are. The policy's are the trainer's where a pass
    made them, and else those that the engine sampled with.
    """
    arrays, total = batch.arrays, np.zeros_like(advantages) if section.alone else advantages.copy()
    if section.estimator != "sampled":
        return total, {}
    if "teacher_logprobs" not in arrays:
        raise ValueError(
            "batch.arrays: no teacher_logprobs, which algorithm.distillation needs; run the teachers' passes before this call"
        )
    policy = arrays.get("old_logprobs", arrays["rollout_logprobs"])
    taught = batch.loss_mask & np.repeat(batch.samples[TEACHER] >= 0, batch.lengths())
    log_ratio = torch.from_numpy((arrays["teacher_logprobs"] - policy)[taught]).double()
    terms, estimates = sampled(section, log_ratio)
    total[taught] += section.coefficient * terms.clamp(-CLIP, CLIP).float().numpy()
    count, trained = max(1, len(terms)), max(1, int(batch.loss_mask.sum()))
    return total, {
        "distillation/divergence": float(estimates.sum()) / count,
        "distillation/clipped_frac": float((terms.abs() > CLIP).sum()) / count,
        "distillation/taught_frac": len(terms) / trained,
    }


def sampled(section: DistillationSection, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """([n] advantages of sampled tokens, [n] estimates of the divergence in nats), from log T - log pi [n].

    The exponent is bounded at 20, so that one extreme token stays finite.
    """
    return DIVERGENCES[section.divergence](log_ratio, section.teacher_share)


def _reverse(log_ratio: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return log_ratio, -log_ratio


def _forward(log_ratio: Tensor, share: float) -> tuple[Tensor, Tensor]:
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    less = torch.expm1(bounded)
    return less, bounded.exp() * bounded - less


def _jsd(log_ratio: Tensor, share: float) -> tuple[Tensor, Tensor]:
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    log_mixture = torch.log1p(share * torch.expm1(bounded))
    return (1 - share) * log_mixture, share * bounded.exp() * bounded - log_mixture.exp() * log_mixture


DIVERGENCES: dict[str, Callable[[Tensor, float], tuple[Tensor, Tensor]]] = {
    "reverse": _reverse,
    "forward": _forward,
    "jsd": _jsd,
}
"""Name to (advantages, estimates) as a function of log T - log pi and the teacher's share."""
