"""Loss of a reward model over pairs of a chosen and a rejected response.

Consumes: the scores of a micro-batch's responses, and each pair's margin and probability that the chosen
response is better. Produces: this micro-batch's share of the step's loss and metrics; shares add up. A pair
is always in one micro-batch, its chosen response first.

With d = r_w - r_l - m (score difference minus margin), e the smoothing and p the pair's probability, a pair
costs -q log sig(d) - (1 - q) log sig(-d), q = (1 - e) p + e (1 - p): Bradley and Terry (1952), margins as in
Llama 2 (arXiv 2307.09288). Differences leave the level of the scores free. `center` fixes it: the mean over
pairs of (r_w + r_l)^2 (2312.09244), or the square of the sum or mean of all scores of the step (batch-sum
regularisation, 2505.07271).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algorithms.preference import CHOSEN, REJECTED
from mrl.algorithms.tokens import Segments, checked
from mrl.config.sections.tune import ObjectiveSection


def pair_losses(
    section: ObjectiveSection, chosen: Tensor, rejected: Tensor, margin: Tensor, probability: Tensor
) -> Tensor:
    """Return the [P] loss of each pair; all tensors [P], `probability` that the chosen response is better."""
    difference = chosen - rejected - margin
    believed = (1 - section.smoothing) * probability + section.smoothing * (1 - probability)
    return -believed * logsigmoid(difference) - (1 - believed) * logsigmoid(-difference)


class RewardModelObjective:
    """Objective of a reward model's tuning step."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._section = section

    def __call__(
        self,
        *,
        values: Tensor,
        arrays: Mapping[str, Tensor],
        segments: Segments,
        denominators: Mapping[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics) of one packed micro-batch.

        values [N] with gradient; arrays: loss_mask [N], one token per response. segments.values: margin,
        probability, [B] float64. denominators: num_rows, pairs of the step; score_sum over the step, if
        `center` needs it.
        """
        scores, known = _scores(values, arrays["loss_mask"], segments), segments.values
        margin, probability = (known[name][CHOSEN] for name in ("margin", "probability"))
        chosen, rejected = scores[CHOSEN], scores[REJECTED]
        share = 1 / denominators["num_rows"]
        pair_loss = (pair_losses(self._section, chosen, rejected, margin, probability) * share).sum()
        center = self._center(chosen + rejected, denominators)
        metrics = score_metrics(chosen.detach(), rejected.detach(), probability, share)
        metrics |= {"preference/pair_loss": pair_loss.detach(), "preference/center": center.detach()}
        return pair_loss + center, metrics

    def _center(self, total: Tensor, denominators: Mapping[str, Any]) -> Tensor:
        """Return this micro-batch's share of the centring term; total [P] = r_w + r_l.

        The square of a sum over the step has the gradient of a linear form, whose factor a pass before the
        update computes. So the result does not depend on micro-batches or layout.
        """
        center, num_rows = self._section.center, denominators["num_rows"]
        if center is None:
            return total.new_zeros(())
        if center.kind == "pair":
            return center.weight * (total**2 / num_rows).sum()
        part = total.sum()
        factor = center.weight * denominators["score_sum"]
        if center.kind == "batch_mean":
            factor /= (2 * num_rows) ** 2
        return factor * (2 * part - part.detach())


def _scores(values: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """Return the [B] float64 score of each response from values [N]."""
    return segments.sum(checked({"values": values}, mask, segments)["values"].double())


def score_metrics(chosen: Tensor, rejected: Tensor, probability: Tensor, share: float) -> dict[str, Tensor]:
    """Return means over pairs, to be added over micro-batches; `share` is 1 / pairs of the step."""
    difference = chosen - rejected
    metrics = {
        "accuracy": torch.where(  # the probability of the side that scores higher, ties half
            difference > 0, probability, torch.where(difference < 0, 1 - probability, 0.5)
        ),
        "margin_mean": difference,
        "margin_square": difference**2,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }
    return {f"preference/{name}": (values * share).sum() for name, values in metrics.items()}
