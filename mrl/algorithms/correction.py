"""Weights against the difference between the trainer's and the engine's log-probs of the same tokens.

Owns w = exp(old_logprobs - rollout_logprobs) at token and sequence level, its truncations and its measurement. Always
measured (`measure`), applied only where the configuration says so. Weights carry no gradient and do not change any
denominator: a token with weight 0 still counts.

Choices where frameworks differ:
1. sequence_mask measures a sequence by the geometric mean of w, as OpenRLHF does; TRL takes the product ("product").
2. Kept sequences of sequence_mask have weight 1; token_weights="raw" gives OpenRLHF's, "truncated" bounds them from above.
3. icepop drops tokens outside [low, high] (arXiv 2510.18855); truncated bounds w into [low, high] (TIS).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.losses import token_max, token_mean
from mrl.algorithms.segments import Reduce, Segments

_MAX_LOG_RATIO = 20.0
_TOKEN_WEIGHTS = ("none", "raw", "truncated")

KINDS = ("off", "truncated", "icepop", "sequence_mask", "geometric", "product")


def weights(
    kind: str,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    low: float = 0.0,
    high: float = math.inf,
    token_weights: str = "none",
    token_high: float = math.inf,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Weight per token in the inputs' shape ([B, T] or packed [N]), detached, 0 off the mask.

    With w_t per token and W = exp(mean of log w) over a sequence's tokens. off: 1. truncated: clip(w_t, low, high).
    icepop: w_t inside [low, high], else 0. sequence_mask: W inside [low, high] keeps the sequence, with
    `token_weights` none (1), raw (w_t) or truncated (min(w_t, token_high)). geometric: clip(W, low, high). product:
    clip(exp(sum), low, high). `reduce` sums [B] tensors over ranks that hold pieces of a sequence.
    """
    checks.known(kind, KINDS, "correction")
    checks.known(token_weights, _TOKEN_WEIGHTS, "token_weights")
    if not 0 <= low < high:
        raise ValueError(f"low = {low}, high = {high}: need 0 <= low < high")
    mask, segments, log_ratio = _log_ratio(
        old_logprobs, rollout_logprobs, loss_mask, segment_ids, num_segments
    )
    token = torch.exp(log_ratio)
    rules: dict[str, Callable[[], Tensor]] = {
        "off": lambda: torch.ones_like(token),
        "truncated": lambda: token.clamp(low, high),
        "icepop": lambda: token.masked_fill(_outside(token, low, high), 0.0),
        "sequence_mask": lambda: _kept(token, token_weights, token_high).masked_fill(
            _outside(_geometric(log_ratio, mask, segments, reduce), low, high), 0.0
        ),
        "geometric": lambda: _geometric(log_ratio, mask, segments, reduce).clamp(low, high),
        "product": lambda: _product(log_ratio, segments, reduce).clamp(low, high),
    }
    found = rules[kind]()
    return segments.shaped(found.masked_fill(~mask, 0.0))


def measure(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    num_tokens: float | Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """The difference at every granularity, as metrics that add up (see losses).

    policy/rollout_mismatch_kl: k3 of KL(engine || trainer) per token, nats. policy/rollout_difference: mean |log w|.
    policy/rollout_weight_<token|geometric|product>: means over tokens. policy/rollout_difference_max: largest |log w|.
    """
    with torch.no_grad():
        mask, segments, log_ratio = _log_ratio(
            old_logprobs, rollout_logprobs, loss_mask, segment_ids, num_segments
        )
        means = {
            "policy/rollout_mismatch_kl": torch.expm1(log_ratio) - log_ratio,
            "policy/rollout_difference": log_ratio.abs(),
            "policy/rollout_weight_token": torch.exp(log_ratio),
            "policy/rollout_weight_geometric": _geometric(log_ratio, mask, segments, reduce),
            "policy/rollout_weight_product": _product(log_ratio, segments, reduce),
        }
        metrics = {name: token_mean(values, mask, num_tokens) for name, values in means.items()}
        return metrics | {"policy/rollout_difference_max": token_max(log_ratio.abs(), mask)}


def _log_ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor | None,
    num_segments: int | None,
) -> tuple[Tensor, Segments, Tensor]:
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids, num_segments=num_segments)
    named = {"old_logprobs": old_logprobs.detach(), "rollout_logprobs": rollout_logprobs.detach()}
    arrays = checks.per_token(named, mask, segments)
    difference = arrays["old_logprobs"] - arrays["rollout_logprobs"]
    return segments.flat(mask), segments, difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values < low) | (values > high)


def _kept(token: Tensor, token_weights: str, token_high: float) -> Tensor:
    """[N] weights of tokens in the sequences that sequence_mask keeps."""
    return {"none": torch.ones_like(token), "raw": token, "truncated": token.clamp(max=token_high)}[
        token_weights
    ]


def _geometric(log_ratio: Tensor, mask: Tensor, segments: Segments, reduce: Reduce | None) -> Tensor:
    return segments.spread(torch.exp(segments.mean(log_ratio, mask, reduce)))


def _product(log_ratio: Tensor, segments: Segments, reduce: Reduce | None) -> Tensor:
    total = segments.sum(log_ratio, reduce).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return segments.spread(torch.exp(total))
