"""Whitening of advantages over a batch. Its own block: estimators do not whiten by themselves.

Choices where frameworks differ: variance with `ddof` 1 and eps added to it (ROLL, TRL, verl); ddof=0 with
floor="clamp" is OpenRLHF's. With fewer than two entries nothing changes. The result is 0 off the mask.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.segments import Reduce, Segments


def whiten(
    values: Tensor,
    loss_mask: Tensor,
    *,
    segment_ids: Tensor | None = None,
    weigh_by: Literal["tokens", "samples"] = "tokens",
    ddof: int = 1,
    eps: float = 1e-8,
    floor: Literal["add", "clamp"] = "add",
    mean_only: bool = False,
    reduce: Reduce | None = None,
) -> Tensor:
    """(values - mean) / sqrt(variance + eps), [B, T] or packed [N]; floor="clamp" divides by sqrt(max(variance, eps)).

    weigh_by="tokens": every masked-in token counts once. "samples": every sequence counts once, with the mean of its
    tokens, so that the sample mean becomes 0. `reduce` sums over ranks that hold other samples. `mean_only` centres.
    """
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids)
    flat = checks.per_token({"values": values}, mask, segments)["values"]
    kept = segments.flat(mask)
    numbers = flat.to(torch.float64)
    if weigh_by == "samples":
        counted = segments.sum(kept.to(numbers.dtype)) > 0
        entries = segments.mean(numbers, kept)[counted]
    else:
        entries = numbers[kept]
    total = reduce or (lambda x: x)
    count = total(entries.new_full((1,), float(len(entries))))
    if float(count) < 2:
        return segments.shaped(flat.clone())
    mean = total(entries.sum()[None]) / count
    centred = numbers - mean
    if not mean_only:
        variance = total((entries - mean).square().sum()[None]) / (count - ddof)
        centred = centred / (variance + eps if floor == "add" else variance.clamp(min=eps)).sqrt()
    return segments.shaped(centred.masked_fill(~kept, 0.0).to(flat.dtype))
