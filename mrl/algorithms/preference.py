"""Losses over pairs of a chosen and a rejected response, and over single labelled responses.

Consumes: a micro-batch's log-probs, and for each response its side (1 chosen, 0 rejected) and reference
log-prob (float64). Produces: this micro-batch's share of the step's loss and metrics; shares add up. A pair
is always in one micro-batch, its chosen response first.

With s the log-ratio of a response to the reference (summed over its tokens, or averaged with length mean),
the loss of a pair is a function of s_w and s_l. Formulas: DPO arXiv 2305.18290 with smoothing as in its cDPO
note, robust 2403.00409, IPO 2310.12036, SimPO 2405.14734, ORPO 2403.07691, KTO 2402.01306, SLiC hinge
2305.10425, APO 2408.06266, EXO 2402.00856.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algorithms.tokens import Segments, checked
from mrl.algorithms.user_function import require_trial_passes, user_function
from mrl.config.sections.tune import ObjectiveSection

CHOSEN, REJECTED = slice(0, None, 2), slice(1, None, 2)
"""Sequences of a micro-batch of pairs, as slices: a mask would make the host wait for the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The chosen, or the rejected, responses of P pairs."""

    logprob: Tensor
    """[P] float64: sum over the response's tokens."""
    ref_logprob: Tensor
    """[P] float64: the same under the reference; 0 if the objective has none."""
    length: Tensor
    """[P] float64: tokens, at least 1."""

    def mean(self) -> Tensor:
        """Return the [P] log-prob per token."""
        return self.logprob / self.length

    def ratio(self, section: ObjectiveSection) -> Tensor:
        """Return the [P] log-ratio to the reference, or its mean over tokens."""
        ratio = self.logprob - self.ref_logprob
        return ratio / self.length if section.length == "mean" else ratio


PairLoss = Callable[[ObjectiveSection, Side, Side], Tensor]
_FUNCTION = "tune.objective.function"


def _dpo(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    return _smoothed(section, section.beta * (chosen.ratio(section) - rejected.ratio(section)))


def _smoothed(section: ObjectiveSection, logits: Tensor) -> Tensor:
    kept, flipped = logsigmoid(logits), logsigmoid(-logits)
    return -(1 - section.smoothing) * kept - section.smoothing * flipped


def _robust(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    logits, e = section.beta * (chosen.ratio(section) - rejected.ratio(section)), section.smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def _ipo(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    return (chosen.ratio(section) - rejected.ratio(section) - 1 / (2 * section.beta)) ** 2


def _simpo(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    margin = chosen.mean() - rejected.mean() - section.gamma_over_beta
    return _smoothed(section, section.beta * margin)


def _orpo(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    odds = _log_odds(chosen.mean()) - _log_odds(rejected.mean())
    return -chosen.mean() - section.beta * logsigmoid(odds)


def _log_odds(mean: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for p = exp(mean); the clamp keeps a response of probability 1 finite."""
    mean = mean.clamp(max=-1e-12)
    return mean - torch.log(-torch.expm1(mean))


def _hinge(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    return torch.relu(1 - section.beta * (chosen.ratio(section) - rejected.ratio(section)))


def _apo_zero(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    up, down = section.beta * chosen.ratio(section), section.beta * rejected.ratio(section)
    return 1 - torch.sigmoid(up) + torch.sigmoid(down)


def _apo_down(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    up, down = section.beta * chosen.ratio(section), section.beta * rejected.ratio(section)
    return torch.sigmoid(up) + 1 - torch.sigmoid(up - down)


def _exo(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    logits, e = section.beta * (chosen.ratio(section) - rejected.ratio(section)), section.smoothing
    kept = torch.sigmoid(logits) * (logsigmoid(logits) - math.log(1 - e))
    return kept + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(e))


PAIR_LOSSES: dict[str, PairLoss] = {
    "dpo": _dpo,
    "robust": _robust,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
    "hinge": _hinge,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "exo": _exo,
}


def pair_loss_of(section: ObjectiveSection) -> PairLoss:
    """Return the configured pair loss; raise ConfigError if a user-defined one cannot be called."""
    if section.function is None:
        return PAIR_LOSSES[section.name]
    takes = ["section", "chosen", "rejected"]
    return user_function(section.function, section.options, setting=_FUNCTION, takes=takes)


def try_pair_loss(section: ObjectiveSection) -> None:
    """Call a user-defined loss with two made-up pairs.

    Raise ConfigError if it fails or does not return a [P] tensor with a gradient to the log-probs.
    """
    if section.function is not None:
        loss = pair_loss_of(section)
        require_trial_passes(section.function, lambda: _fault(loss, section), setting=_FUNCTION)


def _fault(loss: PairLoss, section: ObjectiveSection) -> str:
    """Return the error in a loss's result; empty if there is none."""

    def side(*logprobs: float) -> Side:
        values = torch.tensor(logprobs, dtype=torch.float64)
        return Side(values.clone().requires_grad_(), values - 0.5, torch.full_like(values, 4.0))

    result: object = loss(section, side(-3.0, -9.0), side(-5.0, -6.0))
    if not torch.is_tensor(result) or result.shape != (2,):
        shape = list(result.shape) if torch.is_tensor(result) else type(result).__name__
        return f"it returned {shape}, not a tensor with one value per pair, [2]"
    if not result.requires_grad:
        return "it has no gradient to the log-probs"
    return "" if bool(torch.isfinite(result).all()) else f"it returned {result.tolist()}"


def kto_losses(section: ObjectiveSection, side: Side, is_wanted: Tensor, z: Tensor) -> Tensor:
    """Return KTO's [P] losses; `z` is the step's mean log-ratio of mismatched responses, at least 0."""
    ratio = side.ratio(section)
    wanted = section.desirable_weight * (1 - torch.sigmoid(section.beta * (ratio - z)))
    unwanted = section.undesirable_weight * (1 - torch.sigmoid(section.beta * (z - ratio)))
    return torch.where(is_wanted, wanted, unwanted)


def rewards(section: ObjectiveSection, side: Side) -> Tensor:
    """Return the objective's implicit [P] rewards: beta times the quantity that its loss compares."""
    compared = side.ratio(section) if section.needs_reference else side.mean()
    return section.beta * compared


class PreferenceObjective:
    """Objective of a tuning step over pairs, or over labelled responses (kto)."""

    def __init__(self, section: ObjectiveSection) -> None:
        """Raise ConfigError if a user-defined loss cannot be imported."""
        self._section = section
        self._loss = pair_loss_of(section) if section.takes_pairs else None

    def __call__(
        self,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        arrays: Mapping[str, Tensor],
        segments: Segments,
        denominators: Mapping[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics) of one packed micro-batch; logprobs [N] with gradient, arrays: loss_mask.

        segments.values, [B] float64: ref_logprob, and side for kto. denominators: num_rows, the pairs or
        labelled responses of the step; for kto also kto_z, num_chosen, num_rejected.
        """
        del entropy
        mask, known = arrays["loss_mask"], segments.values
        kept = checked({"logprobs": logprobs}, mask, segments)["logprobs"].double()
        whole = Side(segments.sum(kept), known["ref_logprob"], segments.sum(mask.double()).clamp(min=1))
        if self._loss is None:
            return self._labelled(whole, known["side"] > 0, denominators)
        return self._paired(whole, denominators)

    def _paired(self, whole: Side, denominators: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._loss is not None
        section, chosen, rejected = self._section, _of(whole, CHOSEN), _of(whole, REJECTED)
        share = 1 / denominators["num_rows"]
        pair_loss = (self._loss(section, chosen, rejected) * share).sum()
        loss = pair_loss
        metrics = pair_metrics(section, chosen, rejected, share)
        metrics["preference/pair_loss"] = pair_loss.detach()
        if section.sft_weight:
            loss = loss - section.sft_weight * (chosen.mean() * share).sum()
        return loss, metrics

    def _labelled(
        self, whole: Side, is_wanted: Tensor, denominators: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        z = whole.logprob.new_full((), denominators["kto_z"])
        loss = kto_losses(self._section, whole, is_wanted, z).sum() / denominators["num_rows"]
        reward = rewards(self._section, whole).detach()
        metrics = {"preference/pair_loss": loss.detach()}
        for name, rows in (("chosen", is_wanted), ("rejected", ~is_wanted)):
            metrics[f"preference/reward_{name}"] = (reward * rows).sum() / max(
                1e-9, denominators[f"num_{name}"]
            )
        return loss, metrics


def pair_metrics(section: ObjectiveSection, chosen: Side, rejected: Side, share: float) -> dict[str, Tensor]:
    """Return means over pairs, to be added over micro-batches; `share` is 1 / pairs of the step."""
    with torch.no_grad():
        up, down = rewards(section, chosen), rewards(section, rejected)
        correct = (up > down).double() + 0.5 * (up == down)
        means = {
            "accuracy": correct,
            "margin_mean": up - down,
            "margin_square": (up - down) ** 2,
            "reward_chosen": up,
            "reward_rejected": down,
            "logp_chosen_per_token": chosen.mean(),
        }
        if section.needs_reference:
            means["chosen_down_frac"] = (chosen.logprob < chosen.ref_logprob).double()
        return {f"preference/{name}": (values * share).sum() for name, values in means.items()}


def _of(side: Side, rows: slice) -> Side:
    return Side(side.logprob[rows], side.ref_logprob[rows], side.length[rows])
