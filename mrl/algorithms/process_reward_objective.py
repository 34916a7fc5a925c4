"""The loss of a process reward model over steps that were judged.

Consumes: the scores of a microbatch, one at the place after each judged step, and the steps' labels there. Produces: this
microbatch's share of the step's loss, and metrics of the same kind (shares are added).

With s the score of a step, p the probability that it is right by its label, and e the smoothing, a step costs
-q log sig(s) - (1 - q) log sig(-s), q = (1 - e) p + e (1 - p): s are log-odds ("Let's Verify Step by Step", arXiv 2305.20050; soft
labels as in Math-Shepherd, 2312.08935). The loss is the mean over all judged steps of an optimizer step, so that no microbatch and
no layout changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mrl.algorithms.reward_model_objective import agreement, label_losses
from mrl.algorithms.tokens import Segments, checked
from mrl.config.sections.tune import ObjectiveSection


class ProcessRewardObjective:
    """What a tuning step of a process reward model minimises."""

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
        """(loss, metrics) of one packed microbatch; values [N] with gradient, arrays: loss_mask [N], one token a judged step, and
        step_labels [N]. denominators: num_tokens, the judged steps of the whole optimizer step."""
        mask = arrays["loss_mask"]
        kept = checked({"values": values, "step_labels": arrays["step_labels"]}, mask, segments)
        scores, labels = (kept[name][mask].double() for name in ("values", "step_labels"))
        steps = denominators["num_tokens"]
        loss = label_losses(self._section, scores, labels).sum() / steps
        means = {"step_loss": loss} | step_metrics(scores, labels, steps)
        return loss, {f"process/{name}": value.detach() for name, value in means.items()}


def step_metrics(scores: Tensor, labels: Tensor, steps: float) -> dict[str, Tensor]:
    """Sums over [S] steps divided by `steps`, those of all microbatches."""
    found = {"accuracy": agreement(scores, labels), "probability": scores.sigmoid(), "label": labels}
    return {name: each.sum() / steps for name, each in found.items()}
