"""Policy and value loss by name: checks, aggregation and metrics around the formulas of policy_losses.

Metrics follow one rule everywhere: they are already divided by the step-wide denominators, so that values of
microbatches and ranks are added; names ending in _max are combined by maximum.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms import checks, policy_losses
from mrl.algorithms.aggregation import Denominator, aggregate, aggregate_flat
from mrl.algorithms.policy_losses import Loss, Tokens, register
from mrl.algorithms.segments import Reduce, Segments

__all__ = ["aggregate", "policy_loss", "register", "value_loss"]


def policy_loss(
    name: str | Loss,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    weights: Tensor | None = None,
    scores: Tensor | None = None,
    reduce: Reduce | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(scalar loss to minimise, metrics) of the loss of that name, or of a function with the same signature.

    Tensors are [B, T] or packed [N] with `segment_ids` [N]; float32 or float64; log-probs in nats. `clip_low` and
    `clip_high` are offsets from 1, default to the loss's own, and are ignored by losses without bounds. `weights` multiply each token's loss and get no
    gradient (train/rollout correction); they do not change the denominators. `scores` are raw rewards, per token or
    [B]. `reduce` sums [B] tensors over ranks that hold pieces of a sequence (context parallelism), differentiably.
    For denominators see `aggregate`. Further `options` are the loss's (dual_clip, normalise, ...).

    Raises ValueError or TypeError naming the argument (and sample) for wrong shapes, dtypes, NaN, infinities, names.
    """
    loss = policy_losses.find(name) if isinstance(name, str) else name
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids, num_segments=num_segments)
    arrays = checks.per_token(
        {
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "advantages": advantages,
            "weights": weights,
            "scores": _scores_per_token(scores, segments),
        },
        mask,
        segments,
    )
    given = {"clip_low": clip_low, "clip_high": clip_high} | options
    tokens = Tokens(
        logprobs=arrays["logprobs"],
        old_logprobs=arrays["old_logprobs"].detach(),
        advantages=arrays["advantages"].detach(),
        mask=segments.flat(mask),
        segments=segments,
        scores=arrays.get("scores"),
        reduce=reduce,
    )
    result = loss(tokens, **_accepted(loss, str(name), given))
    per_token = result.loss * arrays["weights"].detach() if weights is not None else result.loss
    total = aggregate_flat(
        per_token,
        tokens.mask,
        aggregation,
        segments,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        constant=constant,
        reduce=reduce,
    )
    return total, _policy_metrics(result, tokens, num_tokens)


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    clip: float | None = 0.2,
    aggregation: str = "token_mean",
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics): half the aggregated max((V - R)^2, (clip(V, old +- clip) - R)^2) (PPO, arXiv 1707.06347).

    `clip` is in units of value; None takes the first square alone. Shapes and denominators as in `policy_loss`.
    """
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids, num_segments=num_segments)
    named = {"values": values, "old_values": old_values, "returns": returns}
    arrays = checks.per_token(named, mask, segments)
    new, old, target = arrays["values"], arrays["old_values"].detach(), arrays["returns"].detach()
    free = (new - target).square()
    error, clipped = free, torch.zeros_like(free, dtype=torch.bool)
    if clip is not None:
        checks.positive("clip", clip)
        bounded = (new.clamp(old - clip, old + clip) - target).square()
        error, clipped = torch.maximum(free, bounded), bounded.detach() > free.detach()
    flat = segments.flat(mask)
    total = aggregate_flat(
        error / 2,
        flat,
        aggregation,
        segments,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        reduce=reduce,
    )
    metrics = {
        "critic/clip_frac": clipped,
        "critic/value_mean": new,
        "critic/return_mean": target,
        "critic/error_squared": free,
    }
    return total, {key: token_mean(v, flat, num_tokens) for key, v in metrics.items()}


def token_mean(values: Tensor, mask: Tensor, num_tokens: Denominator = None) -> Tensor:
    """Detached sum over masked-in tokens / num_tokens (their own count where it is None); bool counts as 0 and 1."""
    floats = values.detach().to(values.dtype if values.is_floating_point() else torch.float64)
    kept = floats.masked_fill(~mask, 0.0)
    count = torch.as_tensor(mask.sum() if num_tokens is None else num_tokens, device=kept.device)
    return kept.sum() / count.clamp(min=1)


def token_max(values: Tensor, mask: Tensor) -> Tensor:
    """Detached largest masked-in value of a nonnegative [N] tensor, 0 without one."""
    kept = values.detach().masked_fill(~mask, 0.0)
    return kept.max() if kept.numel() else kept.new_zeros(())


def _scores_per_token(scores: Tensor | None, segments: Segments) -> Tensor | None:
    if scores is None or scores.shape == segments.shape:
        return scores
    return segments.shaped(segments.spread(checks.per_sample("scores", scores, segments.count)))


def _accepted(loss: Loss, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; one the loss does not take is an error, except for bounds it does not have."""
    names = list(inspect.signature(loss).parameters)[1:]
    bounds = ("clip_low", "clip_high")
    given = {key: v for key, v in options.items() if v is not None and (key in names or key not in bounds)}
    for key in given:
        if key not in names:
            raise ValueError(
                f"policy loss '{name}' takes no {key}; it takes: {', '.join(names) or 'no options'}"
            )
    return given


def _policy_metrics(
    result: policy_losses.PerToken, tokens: Tokens, num_tokens: Denominator
) -> dict[str, Tensor]:
    with torch.no_grad():
        mask = tokens.mask
        difference = tokens.logprobs - tokens.old_logprobs
        lengths = tokens.segments.sum(mask.to(difference.dtype), tokens.reduce)
        means = {
            "policy/clip_frac_low": result.clipped_low,
            "policy/clip_frac_high": result.clipped_high,
            "policy/kl_old": torch.expm1(difference.clamp(-20, 20)) - difference,
            "policy/ratio_mean": result.ratio,
        }
        return {name: token_mean(values, mask, num_tokens) for name, values in means.items()} | {
            "policy/ratio_max": token_max(result.ratio, mask),
            "policy/empty_sequences": (lengths == 0).sum().to(difference.dtype),
        }
