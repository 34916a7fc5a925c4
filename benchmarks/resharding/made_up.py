"""Made-up checkpoint bytes: any box follows from its tensor's index, its position and the version alone.

So every rank fills its memory and checks what it received, without the whole checkpoint. Numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor, LocalTensor, TensorSlice
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.resharding.planner.quantised import VALUES, Blocks
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.fp8 import quantised

_PERIOD = 1_000_003
"""Units of two bytes after which the bytes repeat; prime, so that no row width divides it."""
_TENSOR_STEP, _VERSION_STEP = 7_919, 104_729
"""Units between the starts of neighbouring tensors and versions; within a period no two start alike."""


class MadeUp:
    """Bytes of one version."""

    def __init__(self, checkpoint: Sequence[CheckpointTensor], *, version: int) -> None:
        rng = np.random.default_rng(20)
        # bfloat16 between 2^-12 and 2^-4 of either sign; two of them are also a finite float32.
        self._units = rng.integers(0x3980, 0x3D80, _PERIOD, dtype=np.uint16)
        self._units |= rng.integers(0, 2, _PERIOD, dtype=np.uint16) << 15
        self._shapes = {t.name: t.shape for t in checkpoint}
        self._starts = {
            t.name: (i * _TENSOR_STEP + version * _VERSION_STEP) % _PERIOD for i, t in enumerate(checkpoint)
        }

    def box(self, name: str, start: Sequence[int], shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a box of a vector or matrix as a tensor of `dtype` (two or four bytes) and `shape`."""
        units = DTYPE_BYTES[dtype] // 2
        row = math.prod(self._shapes[name][1:])
        first, rows = start[0], shape[0]
        whole = self._run(self._starts[name] + first * row * units, rows * row * units)
        tensor = torch.from_numpy(whole.view(np.int16)).view(DTYPES[dtype])
        if len(shape) == 1:
            return tensor
        return tensor.view(rows, row)[:, start[1] : start[1] + shape[1]]

    def fill(self, local: LocalTensor, flat: torch.Tensor) -> None:
        """Write every piece of a local tensor; leave padding unchanged."""
        for view, box in self._pieces(local, flat):
            view.copy_(box)

    def first_difference(self, local: LocalTensor, flat: torch.Tensor) -> str | None:
        """Return the first difference in a local tensor, byte for byte, or None."""
        for piece, (view, box) in zip(local.pieces, self._pieces(local, flat), strict=True):
            if not torch.equal(_bits(view), _bits(box)):
                return f"{local.name}: the box of {piece.tensor} at {piece.start} of shape {piece.shape}"
        return None

    def _pieces(self, local: LocalTensor, flat: torch.Tensor):
        whole = flat.view(local.shape)
        for piece in local.pieces:
            extra = len(local.shape) - len(piece.shape)
            view = whole[piece.local_start[:extra]]
            for dim, (at, size) in enumerate(zip(piece.local_start[extra:], piece.shape, strict=True)):
                view = view.narrow(dim, at, size)
            yield view, self._expected(piece, local.dtype)

    def _expected(self, piece: TensorSlice, dtype: str) -> torch.Tensor:
        """Return a piece's expected values, quantised from bfloat16 if its parameter is quantised."""
        if dtype == VALUES:
            return quantised(self.box(piece.tensor, piece.start, piece.shape, "bfloat16"), VALUES, BLOCK)
        base = piece.tensor.removesuffix(SCALES)
        if base == piece.tensor:
            return self.box(base, piece.start, piece.shape, dtype)
        start, shape = Blocks(self._shapes[base], BLOCK).elements(piece.start, piece.shape)
        return quantised(self.box(base, start, shape, "bfloat16"), "float32", BLOCK)

    def _run(self, start: int, count: int) -> np.ndarray:
        """Return [count] units from any start of the endless repetition."""
        result = np.empty(count, np.uint16)
        at = 0
        while at < count:
            position = (start + at) % _PERIOD
            size = min(_PERIOD - position, count - at)
            result[at : at + size] = self._units[position : position + size]
            at += size
        return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()
