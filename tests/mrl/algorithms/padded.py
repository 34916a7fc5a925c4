"""The functions under test, called with [B, T] tensors: rows become one packed batch with masked padding.

With `segment_ids` [N] the tensors are packed already. Denominators default to those of the batch itself.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms import advantages, correction_weights, losses
from mrl.algorithms.tokens import Packed, Segments, checked
from mrl.config.sections import policy_loss as sections
from mrl.config.sections.algorithm import AggregationSection, AlgorithmSection, EstimatorSection

SECTIONS = {section.model_fields["name"].default: section for section in sections.LOSSES}
NAMES = tuple(name for name in SECTIONS if name != "custom")
"""Of every loss that comes with the package."""
FORMS = SECTIONS | {"dual_clip": sections.PpoClipLoss}
"""Name -> section of every loss, and of the form of ppo_clip that the constant dual_clip makes."""


def bounds_of(kind: str, *, low: float, high: float) -> dict[str, float]:
    if kind in ("off", "off_policy_mask"):
        return {}
    return {"low": low, "high": high} if kind in ("icepop", "sequence_mask") else {"high": high}


def segments_of(mask: Tensor, segment_ids: Tensor | None = None) -> Segments:
    """Return the rows of a [B, T] mask, or the sequences that the ids name."""
    if segment_ids is None:
        return Segments.of(np.full(*mask.shape))
    return Segments(ids=segment_ids, count=int(segment_ids[-1]) + 1)


def packed(
    like: Tensor,
    mask: Tensor,
    segment_ids: Tensor | None,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
) -> Packed:
    segments, flat = segments_of(mask, segment_ids), mask.bool().reshape(-1)
    tokens = int(flat.sum()) if num_tokens is None else num_tokens
    sequences = int((segments.sum(flat.double()) > 0).sum()) if num_sequences is None else num_sequences
    counts = (like.new_full((), float(max(1, number))) for number in (tokens, sequences))
    return Packed(flat, segments, *counts)


def tokens_of(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor | None = None,
    scores: Tensor | None = None,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
) -> losses.Tokens:
    """Return checked tokens; scores are [B] or per token."""
    place = packed(logprobs, loss_mask, segment_ids, num_tokens, num_sequences)
    if scores is not None and scores.shape != loss_mask.shape:
        scores = place.segments.to_tokens(scores)
    named = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "scores": scores}
    given = {name: values.reshape(-1) for name, values in named.items() if values is not None}
    arrays = checked(given, place.mask, place.segments)
    return losses.Tokens(place.mask, place.segments, place.num_tokens, place.num_sequences, **arrays)


def aggregation_of(mode: str, constant: float | None) -> AggregationSection:
    return AggregationSection.model_validate({"mode": mode, "length": constant})


def policy_loss(
    name: str,
    *,
    aggregation: str = "token_mean",
    constant: int | None = None,
    weights: Tensor | None = None,
    loss_mask: Tensor,
    constants: dict[str, Any] | None = None,
    **arrays: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss with its section's constants, which are not checked against bounds."""
    section = FORMS[name].model_construct(**(constants or {}))
    tokens = tokens_of(loss_mask=loss_mask, **arrays)
    if weights is not None:
        weights = weights.reshape(-1).masked_fill(~tokens.mask, 0.0)
    return losses.policy_loss(losses.loss_of(section), tokens, aggregation_of(aggregation, constant), weights)


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    segment_ids: Tensor | None = None,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
    constant: int | None = None,
) -> Tensor:
    place = packed(values, mask, segment_ids, num_tokens, num_sequences)
    return losses.aggregate(values.reshape(-1), place, aggregation_of(mode, constant))


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    clip: float | None,
    aggregation: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    place = packed(values, loss_mask, None)
    named = {"values": values, "old_values": old_values, "returns": returns}
    arrays = checked({n: v.reshape(-1) for n, v in named.items()}, place.mask, place.segments)
    section = aggregation_of(aggregation, None)
    return losses.value_loss(*arrays.values(), place, section, clip=clip)


def correction_inputs(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, segment_ids: Tensor | None
) -> tuple[losses.Tokens, Tensor]:
    """Return checked tokens and rollout log-probs; the tokens' new log-probs are not read."""
    zeros = torch.zeros_like(old_logprobs)
    tokens = tokens_of(
        logprobs=zeros,
        old_logprobs=old_logprobs,
        advantages=zeros,
        loss_mask=loss_mask,
        segment_ids=segment_ids,
    )
    flat = {"rollout_logprobs": rollout_logprobs.reshape(-1)}
    return tokens, checked(flat, tokens.mask, tokens.segments)["rollout_logprobs"]


def weights(
    kind: str,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    segment_ids: Tensor | None = None,
    **constants: Any,
) -> Tensor:
    """Return correction weights in the shape of the inputs."""
    section = AlgorithmSection.model_validate({"correction": {"kind": kind, **constants}}).correction
    inputs = correction_inputs(old_logprobs, rollout_logprobs, loss_mask, segment_ids)
    return correction_weights.weights(section, *inputs).reshape(loss_mask.shape)


def measure(*, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    return correction_weights.correction_metrics(
        *correction_inputs(old_logprobs, rollout_logprobs, loss_mask, None)
    )


def estimate(
    name: str,
    *,
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    segment_ids: Tensor | None = None,
    has_reward: Tensor | None = None,
    part_weights: list[float] | None = None,
    reward_parts: Tensor | None = None,
    outcomes: Tensor | None = None,
    values: Tensor | None = None,
    reward_mask: Tensor | None = None,
    **constants: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns in the shape and dtype of token_rewards; lam is 1 by default."""
    segments, mask = segments_of(loss_mask, segment_ids), loss_mask.bool().reshape(-1)
    if has_reward is not None:
        mask = mask & segments.to_tokens(has_reward)
    named = {"token_rewards": token_rewards, "values": values, "reward_mask": reward_mask}
    tokens = {key: tensor.reshape(-1) for key, tensor in named.items() if tensor is not None}
    by_part = {str(index): weight for index, weight in enumerate(part_weights or [])}
    section = EstimatorSection.model_validate({"name": name, "lam": 1.0, "part_weights": by_part} | constants)
    rollouts = advantages.Rollouts.of(
        mask=mask,
        segments=segments,
        group_ids=group_ids,
        reward_parts=reward_parts,
        outcomes=outcomes,
        **tokens,
    )
    both = advantages.estimate_advantages(section, rollouts)
    first, second = (tensor.to(token_rewards.dtype).reshape(token_rewards.shape) for tensor in both)
    return first, second


def whiten(values: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Whiten in the shape and dtype of the values."""
    flat, kept = values.reshape(-1).double(), mask.bool().reshape(-1)
    white = advantages.whiten(flat, kept, **options)
    return white.reshape(values.shape).to(values.dtype)
