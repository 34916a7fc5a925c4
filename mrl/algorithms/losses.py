"""Policy losses by name, the critic's loss, and the aggregation of per-token values into one number.

Owns the formulas, their table, and the only division of a loss. Inputs are already checked (tokens.checked).
Old log-probs, KL, entropy and corrections belong to the objective.
Notation: rho = exp(logprobs - old_logprobs), A the advantage, sg stop-gradient, |y| the sequence's tokens.

A policy loss is a function `name(tokens, section)`; its constants are a section of
mrl/config/sections/policy_loss.py. LOSSES maps section to function. A token's loss has a gradient only to
that token's own log-prob, even if its value depends on the whole sequence. So a token with correction weight
0 gets none.

Deviations, numbered:
1. The log ratio is clamped to +-20 before exp, so an extreme token stays finite, without gradient outside.
2. CISPO bounds are offsets from 1 as everywhere else (weight <= 1 + clip_high), not the cap itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.tokens import MAX_LOG_RATIO, Packed, Segments
from mrl.algorithms.user_function import require_trial_passes, user_function
from mrl.config.sections import policy_loss as sections
from mrl.config.sections.algorithm import AggregationSection


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens(Packed):
    """Input of a policy loss; all [N], 0 off the mask; gradients flow through `logprobs` only."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    scores: Tensor | None = None
    """[N] raw reward of the token's sample, for user-defined losses."""
    rollout_logprobs: Tensor | None = None
    """[N] log-probs of the engine that sampled the tokens."""
    ref_logprobs: Tensor | None = None
    """[N] log-probs of the reference policy; None without one."""
    entropy: Tensor | None = None
    """[N] entropy of the policy before the token, nats, without gradient."""
    staleness: Tensor | None = None
    """[N] versions between the weights that sampled a token and those trained."""

    def ratio(self) -> Tensor:
        """Return the [N] importance ratio rho per token."""
        return torch.exp((self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

    def turns(self) -> Tensor:
        """Return the [N] int64 number of a trained token's turn in its sequence, from 0: a turn is a run of
        trained tokens."""
        owner = self.segments.ids.masked_fill(~self.mask, -1)
        starts = (self.mask & (owner != torch.cat((owner.new_full((1,), -1), owner[:-1])))).long()
        counts = self.segments.sum(starts)
        before = self.segments.to_tokens(counts.cumsum(0) - counts)
        return (starts.cumsum(0) - 1 - before).clamp(min=0)

    def groups(self) -> Tensor:
        """Return the [N] int64 number of the prompt that the token's sample answers. Its other samples may be
        in other micro-batches and on other ranks."""
        return self.segments.to_tokens(self.segments.values["group"])

    def sequence_log_ratio(self) -> Tensor:
        """Return the [N] sum of log rho over the token's sequence, without gradient."""
        log_ratio = (self.logprobs - self.old_logprobs).detach()
        return self.segments.to_tokens(self.segments.sum(log_ratio))

    def sequence_length(self) -> Tensor:
        """Return [N] |y| of the token's sequence, at least 1."""
        lengths = self.segments.sum(self.mask.to(self.logprobs.dtype))
        return self.segments.to_tokens(lengths.clamp(min=1))


@dataclasses.dataclass(frozen=True, slots=True)
class PerToken:
    """Output of a policy loss: values to minimise, and detached tensors for the metrics."""

    loss: Tensor
    """[N]; each value has a gradient only to its own token's log-prob (correction weights multiply it)."""
    ratio: Tensor
    """[N] importance ratio that the loss clips or measures."""
    clipped_low: Tensor
    """[N] bool: the lower bound stopped the gradient or changed the weight."""
    clipped_high: Tensor
    """[N] bool: the same for the upper bound."""
    metrics: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """[N] values by name, whose means over the trained tokens are reported as policy/custom/<name>."""


Loss = Callable[[Tokens], PerToken]
"""A policy loss with its constants bound; user-defined: loss(tokens, *, factor=1.0)."""

_FUNCTION = "algorithm.loss.function"
_WITH, _WITHOUT = "corrected_squares", "uncorrected_squares"
"""Keys of sums of squared derivatives by log-probs; `gradient_frac` turns both into one metric."""


def loss_of(section: sections.LossSection) -> Loss:
    """Return the configured loss; raise ConfigError if a user-defined one cannot be imported or called."""
    if isinstance(section, sections.CustomLoss):
        return user_function(section.function, section.options, setting=_FUNCTION, takes=["tokens"])
    return functools.partial(LOSSES[type(section)], section=section)


def ppo_clip(tokens: Tokens, section: sections.PpoClipLoss) -> PerToken:
    """Return -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347).

    With dual_clip the objective for A < 0 is at least dual_clip * A (arXiv 1912.09729, eq. 5).
    """
    clipped, advantages = _clipped(tokens, tokens.ratio(), section), tokens.advantages
    if section.dual_clip is None:
        return clipped
    bounded = torch.minimum(clipped.loss, -section.dual_clip * advantages)
    return dataclasses.replace(clipped, loss=torch.where(advantages < 0, bounded, clipped.loss))


def gspo(tokens: Tokens, section: sections.GspoLoss) -> PerToken:
    """Return PPO clip with one ratio per sequence, s = exp(mean of its log rho) (arXiv 2507.18071, eq. 5-7).

    Uses the token form sg(s) pi / sg(pi) (GSPO-token, eq. 13-14): the value is the sequence's, the gradient
    the token's own. If A is constant over the sequence, both forms have the same gradient. Only this form
    lets a correction weigh each token.
    """
    exponent = tokens.sequence_log_ratio() / tokens.sequence_length()
    through = tokens.logprobs - tokens.logprobs.detach()  # value 0, gradient of the log-prob
    through = torch.where(exponent.abs() <= MAX_LOG_RATIO, through, 0.0)
    ratio = torch.exp(exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + through)
    return _clipped(tokens, ratio, section)


def cispo(tokens: Tokens, section: sections.CispoLoss) -> PerToken:
    """Return -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprobs (arXiv 2506.13585, eq. 4-5)."""
    lowest, highest = 1 - section.clip_low, 1 + section.clip_high
    ratio = tokens.ratio().detach()
    low, high = ratio < lowest, ratio > highest
    weight = ratio.clamp(lowest, highest)
    return PerToken(
        loss=-weight * tokens.advantages * tokens.logprobs, ratio=ratio, clipped_low=low, clipped_high=high
    )


def dppo_tv(tokens: Tokens, section: sections.DppoTvLoss) -> PerToken:
    """Return -rho A, without tokens whose probability moved too far in the direction of A (arXiv 2602.04879).

    The total variation between old and new policy, seen as choices of this token or any other, is the change
    of its probability. Unlike a bound of the ratio, one of the probability lets rare tokens move freely.
    """
    change = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    low = (change < -section.low) & (tokens.advantages < 0)
    high = (change > section.high) & (tokens.advantages > 0)
    ratio = tokens.ratio()
    loss = (-ratio * tokens.advantages).masked_fill(low | high, 0.0)
    return PerToken(loss=loss, ratio=ratio.detach(), clipped_low=low, clipped_high=high)


def reinforce(tokens: Tokens, section: sections.ReinforceLoss | None = None) -> PerToken:
    """Return -A logprobs; the section has no constants."""
    never = torch.zeros_like(tokens.mask)
    loss = -tokens.advantages * tokens.logprobs
    return PerToken(loss=loss, ratio=tokens.ratio().detach(), clipped_low=never, clipped_high=never)


LOSSES: dict[type[sections.LossSection], Callable[..., PerToken]] = {
    sections.PpoClipLoss: ppo_clip,
    sections.GspoLoss: gspo,
    sections.CispoLoss: cispo,
    sections.DppoTvLoss: dppo_tv,
    sections.ReinforceLoss: reinforce,
}
"""Section class to loss function."""


def _clipped(tokens: Tokens, ratio: Tensor, section: Any) -> PerToken:
    advantages, lowest, highest = tokens.advantages, 1 - section.clip_low, 1 + section.clip_high
    unclipped = -ratio * advantages
    detached = ratio.detach()
    return PerToken(
        loss=torch.maximum(unclipped, -ratio.clamp(lowest, highest) * advantages),
        ratio=detached,
        clipped_low=(detached < lowest) & (advantages < 0),
        clipped_high=(detached > highest) & (advantages > 0),
    )


def try_loss(section: sections.LossSection) -> None:
    """Call a user-defined loss with two made-up responses.

    Raise ConfigError if it fails or does not return a PerToken of [N] tensors with a gradient to the
    log-probs.
    """
    if isinstance(section, sections.CustomLoss):
        loss, tokens = loss_of(section), _made_up()
        require_trial_passes(section.function, lambda: _fault(loss(tokens), tokens), setting=_FUNCTION)


def _made_up() -> Tokens:
    """Build responses of three and two tokens, one token outside the mask."""
    return Tokens(
        mask=torch.tensor([True, True, False, True, True]),
        segments=Segments.of(np.array([3, 2]), values={"group": np.array([0, 0])}),
        num_tokens=torch.tensor(4.0),
        num_sequences=torch.tensor(2.0),
        logprobs=torch.tensor([-1.0, -0.5, 0.0, -2.0, -1.5], requires_grad=True),
        old_logprobs=torch.tensor([-1.2, -0.4, 0.0, -1.9, -1.5]),
        advantages=torch.tensor([0.7, 0.7, 0.0, -0.7, -0.7]),
        scores=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]),
        rollout_logprobs=torch.tensor([-1.2, -0.4, 0.0, -1.9, -1.4]),
        ref_logprobs=torch.tensor([-1.1, -0.5, 0.0, -1.9, -1.6]),
        entropy=torch.tensor([0.9, 0.4, 0.0, 1.2, 1.1]),
        staleness=torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]),
    )


def _fault(result: object, tokens: Tokens) -> str:
    """Return the error in a loss's result for these tokens; empty if there is none."""
    if not isinstance(result, PerToken):
        return f"it returned {type(result).__name__}, not mrl.algorithms.losses.PerToken"
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    fields |= {f"metrics[{name!r}]": values for name, values in fields.pop("metrics").items()}
    for name, values in fields.items():
        if not torch.is_tensor(values) or values.shape != tokens.mask.shape:
            shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
            return (
                f"{name} of its result is {shape}, not a tensor with one value per token, "
                f"{list(tokens.mask.shape)}"
            )
    if not result.loss.requires_grad:
        return "its loss has no gradient to tokens.logprobs"
    if not bool(torch.isfinite(result.loss[tokens.mask]).all()):
        return f"its loss is {result.loss.tolist()}"
    return ""


def policy_loss(
    loss: Loss, tokens: Tokens, section: AggregationSection, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (scalar to minimise, metrics). `weights` [N] multiply each token's loss, without gradient; they
    do not change the denominators."""
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
    """Return the effect of the correction weights on the step, as metrics that add up (see tokens).

    `derivative` [N] is that of the uncorrected policy loss by each token's log-prob.
    """
    return {
        "policy/correction_weight": tokens.token_mean(values),
        "policy/correction_dropped_frac": tokens.token_mean(values == 0),
        _WITH: (values * derivative).square().sum(),
        _WITHOUT: derivative.square().sum(),
    }


def gradient_frac(metrics: dict[str, float]) -> dict[str, float]:
    """Return an update's metrics with its two sums replaced by policy/correction_gradient_frac.

    It estimates the norm of the policy gradient with the correction weights over the norm without them. Both
    are norms of the derivatives by log-probs, as if the log-prob gradients of all tokens were orthogonal and
    of equal length. It needs no backward pass.
    """
    kept = {name: value for name, value in metrics.items() if name not in (_WITH, _WITHOUT)}
    if metrics.get(_WITHOUT, 0.0) > 0:
        kept["policy/correction_gradient_frac"] = math.sqrt(metrics[_WITH] / metrics[_WITHOUT])
    return kept


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
        means |= {f"policy/custom/{name}": values for name, values in result.metrics.items()}
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
    """Return (half the aggregated max((V - R)^2, (clip(V, old +- clip) - R)^2), metrics) (arXiv 1707.06347).

    All tensors are [N]; only `values` gets a gradient. `clip` is in units of value; None uses the first
    square alone.
    """
    unclipped = (values - returns).square()
    error, clipped = unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    if clip is not None:
        bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        error, clipped = torch.maximum(unclipped, bounded), bounded.detach() > unclipped.detach()
    metrics = {
        "critic/clip_frac": clipped,
        "critic/value_mean": values,
        "critic/return_mean": returns,
        "critic/error_squared": unclipped,
    }
    total = aggregate(error / 2, tokens, section)
    return total, {name: tokens.token_mean(metric) for name, metric in metrics.items()}


def aggregate(values: Tensor, tokens: Packed, section: AggregationSection) -> Tensor:
    """Return this micro-batch's share of the step's scalar; shares add up over micro-batches and ranks.

    token_mean (DAPO, arXiv 2503.14476): sum / num_tokens. sequence_mean (DeepSeekMath, 2402.03300): sum over
    sequences of the mean over their masked-in tokens / num_sequences. constant (Dr. GRPO, 2503.20783): sum /
    (num_sequences * length), `length` in tokens. Values off the mask have no effect; an empty mask gives 0.
    The sequences of one sample count as one: their mean is over the sample's tokens (`sample_tokens`).
    """
    kept = values.masked_fill(~tokens.mask, 0.0)
    if section.mode == "token_mean":
        return kept.sum() / tokens.num_tokens
    if section.mode == "constant":
        assert section.length is not None, "checked by the section"
        return kept.sum() / (tokens.num_sequences * section.length)
    counts = tokens.segments.values.get("sample_tokens", tokens.segments.sum(tokens.mask.to(kept.dtype)))
    return (tokens.segments.sum(kept) / counts.to(kept.dtype).clamp(min=1)).sum() / tokens.num_sequences
