"""The losses as formulas: of the policy by name, of the critic, and how per-token values become one number.

Owns the formulas, their table, and the only place where a loss is divided by anything. Inputs are checked before
(tokens.checked); old log-probs, KL, entropy and corrections are the objective's.
Notation: rho = exp(logprobs - old_logprobs), A the advantage, sg stop-gradient, |y| the sequence's tokens.

A policy loss is one function `name(tokens, section)` and its constants, a section of mrl/config/sections/policy_loss.py;
LOSSES ties the one to the other. A token's value passes gradient to that token's own log-prob only, also where the
value is made of its sequence: so a token that a correction weighs with 0 gets none.

Deviations, numbered:
1. The log ratio is bounded at +-20 before exp, so that an extreme token is finite; it passes no gradient outside.
2. CISPO bounds are offsets from 1 as everywhere else (weight <= 1 + clip_high), not the cap itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.own_function import own_function, tried
from mrl.algorithms.tokens import MAX_LOG_RATIO, Packed, Segments
from mrl.config.sections import policy_loss as sections
from mrl.config.sections.algorithm import AggregationSection


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens(Packed):
    """What a policy loss sees. All [N], with 0 where the mask is False; gradients flow through `logprobs` only."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    scores: Tensor | None = None
    """[N] raw reward of the token's sample, for a loss of the user's own."""

    def ratio(self) -> Tensor:
        """[N] rho per token."""
        return torch.exp((self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

    def sequence_log_ratio(self) -> Tensor:
        """[N] sum of log rho over the token's sequence, without gradient."""
        log_ratio = (self.logprobs - self.old_logprobs).detach()
        return self.segments.spread(self.segments.sum(log_ratio))

    def sequence_length(self) -> Tensor:
        """[N] |y| of the token's sequence, at least 1."""
        lengths = self.segments.sum(self.mask.to(self.logprobs.dtype))
        return self.segments.spread(lengths.clamp(min=1))


@dataclasses.dataclass(frozen=True, slots=True)
class PerToken:
    """What a policy loss returns: values to minimise, and what the metrics are computed from (detached)."""

    loss: Tensor
    """[N]; each with gradient to the token's own log-prob only (a correction's weights are multiplied with it)."""
    ratio: Tensor
    """[N] the ratio that the loss clips or measures."""
    clipped_low: Tensor
    """[N] bool: the lower bound took the gradient or changed the weight."""
    clipped_high: Tensor
    """[N] bool, the upper bound."""


Loss = Callable[[Tokens], PerToken]
"""A policy loss with its constants; a user's own function takes them as keywords: loss(tokens, *, factor=1.0)."""

_FUNCTION = "algorithm.loss.function"
_WITH, _WITHOUT = "corrected_squares", "uncorrected_squares"
"""Sums of squared derivatives by log-probs; `gradient_frac` makes one figure of them."""


def loss_of(section: sections.LossSection) -> Loss:
    """The configured loss; ConfigError for a user's function that cannot be imported or called with its options."""
    if isinstance(section, sections.CustomLoss):
        return own_function(section.function, section.options, setting=_FUNCTION, takes=["tokens"])
    return functools.partial(LOSSES[type(section)], section=section)


def ppo_clip(tokens: Tokens, section: sections.PpoClipLoss) -> PerToken:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347).

    With dual_clip the objective for A < 0 is at least dual_clip * A (arXiv 1912.09729, eq. 5).
    """
    clipped, advantages = _clipped(tokens, tokens.ratio(), section), tokens.advantages
    if section.dual_clip is None:
        return clipped
    bounded = torch.minimum(clipped.loss, -section.dual_clip * advantages)
    return dataclasses.replace(clipped, loss=torch.where(advantages < 0, bounded, clipped.loss))


def gspo(tokens: Tokens, section: sections.GspoLoss) -> PerToken:
    """PPO clip with one ratio per sequence, s = exp(mean of log rho over its tokens) (arXiv 2507.18071, eq. 5-7).

    In the token form sg(s) pi / sg(pi) (GSPO-token, eq. 13-14): the value is the sequence's, the gradient the token's
    own. Where A is the sequence's both forms have the same gradient; with a correction only this one weighs each
    token's.
    """
    exponent = tokens.sequence_log_ratio() / tokens.sequence_length()
    own = tokens.logprobs - tokens.logprobs.detach()  # 0, with the gradient of the log-prob
    own = torch.where(exponent.abs() <= MAX_LOG_RATIO, own, 0.0)
    ratio = torch.exp(exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own)
    return _clipped(tokens, ratio, section)


def cispo(tokens: Tokens, section: sections.CispoLoss) -> PerToken:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprobs (arXiv 2506.13585, eq. 4-5)."""
    lowest, highest = 1 - section.clip_low, 1 + section.clip_high
    ratio = tokens.ratio().detach()
    low, high = ratio < lowest, ratio > highest
    weight = ratio.clamp(lowest, highest)
    return PerToken(
        loss=-weight * tokens.advantages * tokens.logprobs, ratio=ratio, clipped_low=low, clipped_high=high
    )


def reinforce(tokens: Tokens, section: sections.ReinforceLoss | None = None) -> PerToken:
    """-A logprobs; the section holds no constants."""
    never = torch.zeros_like(tokens.mask)
    loss = -tokens.advantages * tokens.logprobs
    return PerToken(loss=loss, ratio=tokens.ratio().detach(), clipped_low=never, clipped_high=never)


LOSSES: dict[type[sections.LossSection], Callable[..., PerToken]] = {
    sections.PpoClipLoss: ppo_clip,
    sections.GspoLoss: gspo,
    sections.CispoLoss: cispo,
    sections.ReinforceLoss: reinforce,
}
"""Section to formula."""


def _clipped(tokens: Tokens, ratio: Tensor, section: Any) -> PerToken:
    advantages, lowest, highest = tokens.advantages, 1 - section.clip_low, 1 + section.clip_high
    free = -ratio * advantages
    still = ratio.detach()
    return PerToken(
        loss=torch.maximum(free, -ratio.clamp(lowest, highest) * advantages),
        ratio=still,
        clipped_low=(still < lowest) & (advantages < 0),
        clipped_high=(still > highest) & (advantages > 0),
    )


def try_loss(section: sections.LossSection) -> None:
    """Calls a loss of the user's own with the tokens of two made-up responses; ConfigError where it fails, or gives
    something else than PerToken of [N] with a gradient to the log-probs."""
    if isinstance(section, sections.CustomLoss):
        loss, tokens = loss_of(section), _made_up()
        tried(section.function, lambda: _fault(loss(tokens), tokens), setting=_FUNCTION)


def _made_up() -> Tokens:
    """Responses of three and two tokens, one of them not trained on."""
    return Tokens(
        mask=torch.tensor([True, True, False, True, True]),
        segments=Segments.of(np.array([3, 2])),
        num_tokens=torch.tensor(4.0),
        num_sequences=torch.tensor(2.0),
        logprobs=torch.tensor([-1.0, -0.5, 0.0, -2.0, -1.5], requires_grad=True),
        old_logprobs=torch.tensor([-1.2, -0.4, 0.0, -1.9, -1.5]),
        advantages=torch.tensor([0.7, 0.7, 0.0, -0.7, -0.7]),
        scores=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]),
    )


def _fault(found: object, tokens: Tokens) -> str:
    """What is wrong with what a loss gave for the tokens; empty where nothing is."""
    if not isinstance(found, PerToken):
        return f"it gave {type(found).__name__}, not mrl.algorithms.losses.PerToken"
    for field in dataclasses.fields(found):
        values = getattr(found, field.name)
        if not torch.is_tensor(values) or values.shape != tokens.mask.shape:
            shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
            return f"{field.name} of what it gave is {shape}, not a tensor of one value a token, {list(tokens.mask.shape)}"
    if not found.loss.requires_grad:
        return "its loss has no gradient to tokens.logprobs"
    if not bool(torch.isfinite(found.loss[tokens.mask]).all()):
        return f"its loss is {found.loss.tolist()}"
    return ""


def policy_loss(
    loss: Loss, tokens: Tokens, section: AggregationSection, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(scalar to minimise, metrics). `weights` [N] multiply each token's loss, without a gradient of their own; they do
    not change the denominators."""
    result = loss(tokens)
    metrics = _policy_metrics(result, tokens)
    if weights is None:
        return aggregate(result.loss, tokens, section), metrics
    uncorrected = aggregate(result.loss, tokens, section)
    if uncorrected.requires_grad:
        (derivative,) = torch.autograd.grad(uncorrected, tokens.logprobs, retain_graph=True)
        metrics |= _weights_metrics(weights, derivative, tokens)
    return aggregate(result.loss * weights, tokens, section), metrics


def _weights_metrics(values: Tensor, derivative: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    """Return what the weights do to the step, as metrics that add up (see tokens).

    Args:
        values: [N] weights as correction.weights returns them.
        derivative: [N] derivative of the uncorrected policy loss by each token's log-prob.
        tokens: those that are trained.
    """
    return {
        "policy/correction_weight": tokens.token_mean(values),
        "policy/correction_dropped_frac": tokens.token_mean(values == 0),
        _WITH: (values * derivative).square().sum(),
        _WITHOUT: derivative.square().sum(),
    }


def gradient_frac(metrics: dict[str, float]) -> dict[str, float]:
    """Return an update's metrics with policy/correction_gradient_frac in place of the two sums that it is made of.

    It estimates the norm of the policy loss's gradient with the weights over that without: both norms are of the derivatives
    by log-probs, as if the log-probs of all tokens had gradients of one length at right angles. It costs no backward pass.
    """
    found = {name: value for name, value in metrics.items() if name not in (_WITH, _WITHOUT)}
    if metrics.get(_WITHOUT, 0.0) > 0:
        found["policy/correction_gradient_frac"] = math.sqrt(metrics[_WITH] / metrics[_WITHOUT])
    return found


def _policy_metrics(result: PerToken, tokens: Tokens) -> dict[str, Tensor]:
    with torch.no_grad():
        difference = tokens.logprobs - tokens.old_logprobs
        lengths = tokens.segments.sum(tokens.mask.to(difference.dtype))
        means = {
            "policy/clip_frac_low": result.clipped_low,
            "policy/clip_frac_high": result.clipped_high,
            "policy/kl_old": torch.expm1(difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - difference,
            "policy/ratio_mean": result.ratio,
        }
        return {name: tokens.token_mean(values) for name, values in means.items()} | {
            "policy/ratio_max": tokens.token_max(result.ratio),
            "policy/empty_sequences": (lengths == 0).sum().to(difference.dtype),
        }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    tokens: Packed,
    section: AggregationSection,
    *,
    clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics): half the aggregated max((V - R)^2, (clip(V, old +- clip) - R)^2) (PPO, arXiv 1707.06347).

    All [N], gradient through `values` alone. `clip` is in units of value; None takes the first square alone.
    """
    free = (values - returns).square()
    error, clipped = free, torch.zeros_like(free, dtype=torch.bool)
    if clip is not None:
        bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        error, clipped = torch.maximum(free, bounded), bounded.detach() > free.detach()
    metrics = {
        "critic/clip_frac": clipped,
        "critic/value_mean": values,
        "critic/return_mean": returns,
        "critic/error_squared": free,
    }
    total = aggregate(error / 2, tokens, section)
    return total, {name: tokens.token_mean(each) for name, each in metrics.items()}


def aggregate(values: Tensor, tokens: Packed, section: AggregationSection) -> Tensor:
    """This microbatch's share of the step's scalar, from [N] values; the shares of microbatches and ranks add up.

    token_mean (DAPO, arXiv 2503.14476): sum / num_tokens. sequence_mean (DeepSeekMath, 2402.03300): sum over sequences
    of the mean over their masked-in tokens / num_sequences. constant (Dr. GRPO, 2503.20783): sum / (num_sequences *
    length), `length` in tokens. What stands off the mask has no effect; a mask without tokens gives 0.
    """
    kept = values.masked_fill(~tokens.mask, 0.0)
    if section.mode == "token_mean":
        return kept.sum() / tokens.num_tokens
    if section.mode == "constant":
        assert section.length is not None, "checked by the section"
        return kept.sum() / (tokens.num_sequences * section.length)
    counts = tokens.segments.sum(tokens.mask.to(kept.dtype))
    return (tokens.segments.sum(kept) / counts.clamp(min=1)).sum() / tokens.num_sequences
