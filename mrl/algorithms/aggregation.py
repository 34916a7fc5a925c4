"""From per-token losses to one number: the only place where a loss is divided by anything.

Owns the three modes and their denominators. The sums over microbatches and ranks are the caller's: with the
denominators of the whole optimizer step given, the parts' results simply add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.segments import Reduce, Segments

MODES = ("token_mean", "sequence_mean", "constant")
"""token_mean: DAPO (arXiv 2503.14476); sequence_mean: DeepSeekMath (2402.03300); constant: Dr. GRPO (2503.20783)."""

Denominator = float | int | Tensor | None


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    mode: str,
    *,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    constant: float | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Scalar from per-token values, [B, T] or packed [N] with `segment_ids`.

    token_mean: sum / num_tokens. sequence_mean: sum over sequences of the mean over their masked-in tokens /
    num_sequences. constant: sum / (num_sequences * constant), `constant` in tokens. `num_tokens` and `num_sequences`
    are those of the whole optimizer step; left out, they are counted here (sequences without a token do not count).
    `reduce` sums token counts per sequence over ranks that hold pieces of a sequence; the result stays this rank's
    share. A mask without tokens gives 0.
    """
    checks.known(mode, MODES, "aggregation")
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids, num_segments=num_segments)
    flat = checks.per_token({"per_token": per_token}, mask, segments)["per_token"]
    return aggregate_flat(
        flat,
        segments.flat(mask),
        mode,
        segments,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        constant=constant,
        reduce=reduce,
    )


def aggregate_flat(
    values: Tensor,
    mask: Tensor,
    mode: str,
    segments: Segments,
    *,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    constant: float | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """`aggregate` on checked flat [N] values; what stands off the mask has no effect."""
    if (mode == "constant") != (constant is not None):
        raise ValueError(
            f"constant = {constant} with aggregation '{mode}': constant needs it, the others take none"
        )
    kept = values.masked_fill(~mask, 0.0)
    if mode == "token_mean":
        return kept.sum() / _at_least_one(mask.sum() if num_tokens is None else num_tokens, kept)
    counts = segments.sum(mask.to(kept.dtype), reduce)
    sequences = _at_least_one((counts > 0).sum() if num_sequences is None else num_sequences, kept)
    if constant is not None:
        checks.positive("constant", constant)
        return kept.sum() / (sequences * constant)
    return (segments.sum(kept) / counts.clamp(min=1)).sum() / sequences


def _at_least_one(count: Denominator, like: Tensor) -> Tensor:
    """The denominator as a tensor; 0 (nothing to average) becomes 1, so that the result is 0."""
    given = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return torch.where(given == 0, torch.ones_like(given), given)
