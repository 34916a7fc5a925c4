"""The one rule by which weights are quantised: float8 (e4m3) values with a float32 scale for each square block.

DeepSeek-V3's form: weight = value * scale, scale = largest magnitude of the block / 448, so that the largest value is the
format's largest. Values are weight / scale in float32, rounded to nearest even, saturated; a block of zeros, or too small
for float32, has scale 1. Which tensors have this form, and where their blocks lie, is `quantised`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from resharding.quantised import SCALES, quantises

LARGEST = 448.0
"""Of torch.float8_e4m3fn."""


def block_scales(weight: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, cols] weight that begins on a block -> [ceil(rows / block), ceil(cols / block)] float32."""
    bands = [_largest(weight[at : at + block], block) for at in range(0, len(weight), block)]
    scales = torch.stack(bands).float() / LARGEST
    return torch.where(scales == 0, 1.0, scales)


def _largest(band: torch.Tensor, block: int) -> torch.Tensor:
    """[rows of one block, cols] -> [ceil(cols / block)], the largest magnitude of each block; NaN where one is in it."""
    bits = torch.int16 if band.itemsize == 2 else torch.int32
    magnitudes = (
        band.view(bits) & torch.iinfo(bits).max
    )  # several times faster than abs, and ordered as numbers are
    cols = torch.nn.functional.pad(magnitudes.amax(0), (0, -band.shape[1] % block))
    return cols.view(-1, block).amax(1).view(band.dtype)


def values(weight: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, cols] float8_e4m3fn."""
    rows, cols = weight.shape
    wide = scales.repeat_interleave(block, 1)[:, :cols]
    result = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=weight.device)
    for band in range(len(scales)):
        here = slice(band * block, min((band + 1) * block, rows))
        result[here] = (weight[here] / wide[band]).clamp_(-LARGEST, LARGEST)
    return result


def quantised(weight: Any, wire: str, block: int) -> Any:
    """The values (wire float8_e4m3fn) or the scales (wire float32) of a box of whole blocks; numpy or torch.

    numpy spells bfloat16 as uint16 and float8 as uint8.
    """
    if isinstance(weight, np.ndarray):
        whole = torch.from_numpy(np.ascontiguousarray(weight))
        whole = whole.view(torch.bfloat16) if weight.dtype == np.uint16 else whole
        made = quantised(whole, wire, block)
        return (made if wire == "float32" else made.view(torch.uint8)).numpy()
    scales = block_scales(weight, block)
    return scales if wire == "float32" else values(weight, scales, block)


def whole_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], block: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Complete checkpoint tensors as an engine with quantised weights wants them. `block` 0: as they are."""
    for name, tensor in tensors:
        if block and quantises(name):
            scales = block_scales(tensor, block)
            yield name, values(tensor, scales, block)
            yield name + SCALES, scales
        else:
            yield name, tensor
