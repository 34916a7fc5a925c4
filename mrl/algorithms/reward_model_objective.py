"""The loss of a reward model over pairs of a chosen and a rejected response.

Consumes: the scores of a microbatch's responses, and what its batch knows of each pair: margin, probability that the
chosen response is the better one. Produces: this microbatch's share of the step's loss, and metrics of the same kind (shares
are added). A pair always lies in one microbatch, its chosen response first.

With d = r_w - r_l - m, the score of the chosen less that of the rejected response less the margin, and e the smoothing, a pair
costs -q log sig(d) - (1 - q) log sig(-d), q = (1 - e) p + e (1 - p), p its probability: Bradley and Terry (1952), margins as in
Llama 2 (arXiv 2307.09288). Differences leave the scores' height free; `center` fixes it: the mean over pairs of (r_w + r_l)^2
(2312.09244), or the square of the sum, or of the mean, of all scores of the step (batch-sum regularisation, 2505.07271).
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
    section: ObjectiveSection,
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor,
    probability: Tensor,
) -> Tensor:
    """[P] what each pair costs; chosen and rejected [P] scores, margin [P], probability [P] of the chosen one being better."""
    difference = chosen - rejected - margin
    believed = (1 - section.smoothing) * probability + section.smoothing * (1 - probability)
    return -believed * logsigmoid(difference) - (1 - believed) * logsigmoid(-difference)


class RewardModelObjective:
    """What a tuning step of a reward model minimises."""

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
        """(loss, metrics) of one packed microbatch; values [N] with gradient, arrays: loss_mask [N], one token a response.

        segments.values: margin, probability, [B] float64. denominators: num_rows, the pairs of the step; score_sum, the sum of all
        scores of the step, where the centring couples them.
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
        """This microbatch's share of the centring term; total [P] = r_w + r_l.

        The square of a sum over the step has the gradient of a linear form whose factor is known from a pass before the
        update; so no microbatch and no layout changes it.
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
    """[B] float64: the score of each response, by its values [N]."""
    return segments.sum(checked({"values": values}, mask, segments)["values"].double())


def score_metrics(chosen: Tensor, rejected: Tensor, probability: Tensor, share: float) -> dict[str, Tensor]:
    """Means over pairs, `share` being each one's part of 1; to be added over microbatches."""
    difference = chosen - rejected
    found = {
        "accuracy": torch.where(  # the probability of the side that scores higher, ties half
            difference > 0, probability, torch.where(difference < 0, 1 - probability, 0.5)
        ),
        "margin_mean": difference,
        "margin_square": difference**2,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }
    return {f"preference/{name}": (values * share).sum() for name, values in found.items()}
