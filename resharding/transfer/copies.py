"""Runs tables of copies (`planner/copy_table`) over flat arrays of numpy or torch, casting and quantising on
the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrl.resharding.planner.copy_table import BUCKET, CopyTable
from mrl.resharding.planner.manifest import WIRE_DTYPES
from mrl.resharding.transfer.fp8 import quantised

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
"""The types of the tensors that may travel, by torch's names without the prefix."""


def run_copies(table: CopyTable, sources: Sequence[Any] | Any, targets: Sequence[Any] | Any) -> None:
    """Executes a table over flat 1-D arrays. The side that is the bucket is one flat uint8 array; the other a
    sequence indexed by tensor. Casting follows the target's dtype, through the wire dtype where a bucket is
    involved."""
    if not len(table):
        return
    reads, writes = _Side(sources), _Side(targets)
    if not isinstance(writes.flat(int(table["target"][0]), int(table["wire"][0])), np.ndarray):
        single = (table["rows"] == 1) & (table["block"] == 0)
        _run_together(table[single], reads, writes)
        table = table[~single]
    for row in table.tolist():
        source, at, step, target, to, stride, rows, cols, wire, _, block = row
        values = _view(reads.flat(source, wire), at, step, rows, cols)
        if block:
            values = quantised(values.reshape(rows, cols), WIRE_DTYPES[wire], block)
            rows, cols = values.shape
        assign(_view(writes.flat(target, wire), to, stride, rows, cols), values)


def _run_together(table: CopyTable, reads: _Side, writes: _Side) -> None:
    """torch's copies of single runs, one call for each dtype: few launches on a GPU, and little of Python a
    row."""
    for wire in np.unique(table["wire"]).tolist():
        rows = table[table["wire"] == wire]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            writes.runs(wire, rows["target"], rows["target_offset"], rows["cols"]),
            reads.runs(wire, rows["source"], rows["source_offset"], rows["cols"]),
        )


class _Side:
    """Flat arrays by tensor index; a bucket's view as each wire dtype is made once."""

    def __init__(self, arrays: Sequence[Any] | Any) -> None:
        self._arrays = arrays
        self._views: dict[int, Any] = {}

    def flat(self, index: int, wire: int) -> Any:
        if index != BUCKET:
            return self._arrays[index]
        view = self._views.get(wire)
        if view is None:
            view = self._views[wire] = bucket_view(self._arrays, WIRE_DTYPES[wire])
        return view

    def runs(self, wire: int, indices: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> list[Any]:
        """Views of runs, each of one tensor."""
        columns = zip(indices.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        return [self.flat(index, wire)[start : start + length] for index, start, length in columns]


def _view(flat: Any, offset: int, stride: int, rows: int, cols: int) -> Any:
    if rows == 1:
        return flat[offset : offset + cols]
    if isinstance(flat, np.ndarray):
        size = flat.itemsize
        window = flat[offset : offset + (rows - 1) * stride + cols]
        return np.lib.stride_tricks.as_strided(window, (rows, cols), (stride * size, size))
    return flat.as_strided((rows, cols), (stride, 1), flat.storage_offset() + offset)


def bucket_view(bucket: Any, wire: str) -> Any:
    """A flat uint8 bucket as an array of the wire dtype (bfloat16 and float8 as bit patterns in numpy)."""
    if isinstance(bucket, np.ndarray):
        dtype = numpy_dtype(wire)
        return bucket[: bucket.size // dtype.itemsize * dtype.itemsize].view(dtype)
    dtype = getattr(torch, wire)
    return bucket[: bucket.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of a torch spelling; types numpy lacks are unsigned integers of the same width."""
    return np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(name, name))


def assign(target: Any, source: Any) -> None:
    """target[...] = source with a cast; numpy's uint16 stands for bfloat16 (round to nearest even)."""
    if not isinstance(target, np.ndarray):
        target.copy_(source.reshape(target.shape))
        return
    source = source.reshape(target.shape)
    if target.dtype == np.uint16 and source.dtype in (np.float32, np.float64):
        bits = np.ascontiguousarray(source, dtype=np.float32).view(np.uint32)
        target[...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    elif source.dtype == np.uint16 and target.dtype in (np.float32, np.float64):
        target[...] = (source.astype(np.uint32) << 16).view(np.float32)
    else:
        target[...] = source
