"""The one rule that quantises weights: float8 (e4m3) values with a float32 scale per square block.

DeepSeek-V3's form, weight = value * scale, with scales that are powers of two: the smallest, from 2^-22 up,
with which the largest magnitude of the block is at most 464 and so rounds to at most 448, the format's
largest. Values are weight / scale in float32, saturated, rounded to nearest even. `quantised` decides which
tensors have this form, and where their blocks are.

vLLM quantises again to powers of two after loading if it uses DeepGEMM (VLLM_USE_DEEP_GEMM_E8M0, on by
default also on Hopper: requant_weight_ue8m0_inplace). It then finds these scales, 464 and 2^-22 included, and
changes no byte. A float8 number has as many digits under a power of two as under any other scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mrl.models.tensors import SCALES
from mrl.resharding.planner.quantised import quantises

LARGEST = 448.0
"""Largest number of torch.float8_e4m3fn."""
_UP_TO_464, _EXPONENT_OF_464, _SMALLEST_EXPONENT = 0x17FFFF, 8, 127 - 22
"""float32 bits: 464 is 1.8125 * 2^8, and 0x17FFFF carries from any larger mantissa into the exponent."""
_CACHED_ELEMENTS, _DEVICE_ELEMENTS = 1 << 18, 1 << 24
"""Elements quantised at a time: their float32 forms take several times as many bytes."""


def block_scales(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Return [ceil(rows / block), ceil(cols / block)] float32 scales of a weight that begins on a block."""
    largest = torch.cat([_largest(weight[band], block) for band in _bands(weight, block)]).float()
    exponents = (largest.view(torch.int32) + _UP_TO_464 >> 23) - _EXPONENT_OF_464
    scales = (exponents.clamp(min=_SMALLEST_EXPONENT) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, largest)


def values(weight: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Return the quantised values, [rows, cols] float8_e4m3fn."""
    result = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for band in _bands(weight, block):
        part = weight[band]
        tall = scales[band.start // block : -(-band.stop // block)].repeat_interleave(block, 1)
        wide = (
            tall[:, None].expand(-1, block, -1).reshape(-1, tall.shape[1])[: part.shape[0], : part.shape[1]]
        )
        result[band] = (part / wide).clamp_(-LARGEST, LARGEST)
    return result


def _bands(weight: torch.Tensor, block: int) -> Iterator[slice]:
    """Yield row ranges of whole blocks: they fit a CPU's cache, or need few launches on a device."""
    rows, cols = weight.shape
    most = _CACHED_ELEMENTS if weight.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, most // cols // block) * block
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def _largest(band: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest magnitude per block of [rows, cols]; NaN if the block contains one."""
    bits = torch.int16 if band.itemsize == 2 else torch.int32
    # Several times faster than abs; these integers are ordered like the numbers.
    magnitudes = band.view(bits) & torch.iinfo(bits).max
    rows, cols = (-size % block for size in band.shape)
    if rows or cols:
        magnitudes = torch.nn.functional.pad(magnitudes, (0, cols, 0, rows))
    tall = magnitudes.unflatten(0, (-1, block)).amax(1)
    return tall.unflatten(1, (-1, block)).amax(2).view(band.dtype)


def quantised(weight: torch.Tensor, wire: str, block: int) -> torch.Tensor:
    """Return the values (wire float8_e4m3fn) or scales (wire float32) of a box of whole blocks."""
    scales = block_scales(weight, block)
    return scales if wire == "float32" else values(weight, scales, block)


def whole_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], block: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield complete checkpoint tensors in a quantised engine's form; with block 0 yield them unchanged."""
    for name, tensor in tensors:
        if block and quantises(name):
            scales = block_scales(tensor, block)
            yield name, values(tensor, scales, block)
            yield name + SCALES, scales
        else:
            yield name, tensor
