"""Run tables of copies (`planner/copy_table`) over flat tensors, casting and quantising on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrl.resharding.planner.copy_table import BUCKET, CopyTable
from mrl.resharding.planner.manifest import WIRE_DTYPES
from mrl.resharding.transfer.fp8 import quantised

DTYPES = {name: getattr(torch, name) for name in WIRE_DTYPES}
"""Dtypes of the tensors that plans move, by torch's names without the prefix."""


def run_copies(
    table: CopyTable,
    sources: Sequence[torch.Tensor | None] | torch.Tensor,
    targets: Sequence[torch.Tensor | None] | torch.Tensor,
) -> None:
    """Run the copies of a table over flat tensors.

    The bucket's side is one flat uint8 tensor, the other side a sequence indexed by tensor. Values are cast
    to the target's dtype, through the wire dtype if a bucket is involved.
    """
    reads, writes = _Side(sources), _Side(targets)
    single = (table["rows"] == 1) & (table["block"] == 0)
    _run_together(table[single], reads, writes)
    table = table[~single]
    for row in table.tolist():
        source, at, step, target, to, stride, rows, cols, wire, _, block = row
        values = _matrix(reads.flat(source, wire), at, step, rows, cols)
        if block:
            values = quantised(values, WIRE_DTYPES[wire], block)
        _matrix(writes.flat(target, wire), to, stride, *values.shape).copy_(values)


def _run_together(table: CopyTable, reads: _Side, writes: _Side) -> None:
    """Copy single runs with one call per dtype: few GPU launches, and little Python per row."""
    for wire in np.unique(table["wire"]).tolist():
        rows = table[table["wire"] == wire]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            writes.runs(wire, rows["target"], rows["target_offset"], rows["cols"]),
            reads.runs(wire, rows["source"], rows["source_offset"], rows["cols"]),
        )


def wire_arrays(bucket: torch.Tensor) -> list[torch.Tensor]:
    """Return a bucket seen as an array of every wire dtype, in their order."""
    return [as_array(bucket, number) for number in range(len(WIRE_DTYPES))]


def as_array(bucket: torch.Tensor, wire: int) -> torch.Tensor:
    """Return a flat uint8 tensor as an array of a wire dtype; a rest shorter than an element is left out."""
    dtype = DTYPES[WIRE_DTYPES[wire]]
    return bucket[: bucket.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


class _Side:
    """Flat tensors by index; the bucket is viewed once per wire dtype."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors
        self._views: dict[int, torch.Tensor] = {}

    def flat(self, index: int, wire: int) -> torch.Tensor:
        if index != BUCKET:
            return self._tensors[index]
        if wire not in self._views:
            self._views[wire] = as_array(self._tensors, wire)
        return self._views[wire]

    def runs(
        self, wire: int, indices: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> list[torch.Tensor]:
        """Return views of runs, each within one tensor."""
        columns = zip(indices.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        return [self.flat(index, wire)[start : start + length] for index, start, length in columns]


def _matrix(flat: torch.Tensor, offset: int, stride: int, rows: int, cols: int) -> torch.Tensor:
    return flat.as_strided((rows, cols), (stride, 1), flat.storage_offset() + offset)
