"""Tables of strided copies: the unit of work of a plan. Owns their layout, coalescing and execution on flat arrays.

A row copies `rows` runs of `cols` elements. Offsets and strides are in elements of the tensor named (each side in its own
dtype). Tensor index -1 is the bucket, seen as an array of the wire dtype. Arrays may be numpy's or torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BUCKET = -1
WIRE_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8")
FLOAT32 = WIRE_DTYPES.index("float32")
COPY = np.dtype(
    [
        ("source", "i4"),
        ("source_offset", "i8"),
        ("source_stride", "i8"),
        ("target", "i4"),
        ("target_offset", "i8"),
        ("target_stride", "i8"),
        ("rows", "i8"),
        ("cols", "i8"),
        ("wire", "i1"),
        ("module", "i4"),
        ("block", "i4"),
    ]
)
"""`source_stride`, `target_stride`: elements between two runs. `wire`: index into WIRE_DTYPES. `module`: index into the
part's modules (-1 where the target is the bucket). `block`: 0, or the source is quantised by square blocks of this edge, of
which it has whole ones: into values (wire float8_e4m3fn) or scales (wire float32; the target then has an element for each
block, `rows` and `cols` count the source's)."""

CopyTable = np.ndarray
"""A numpy array of dtype COPY."""

Box = tuple[int, int, int]
"""(tensor index, offset, stride) of one side of a copy."""


class CopyList:
    """Collects copies and joins a new one to the last where both sides continue it; what is quantised stays a box."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, source: Box, target: Box, *, rows: int, cols: int, wire: int, module: int, block: int = 0
    ) -> None:
        if block:
            self._rows.append([*source, *target, rows, cols, wire, module, block])
            return
        if rows == 1 or (source[2] == cols and target[2] == cols):
            rows, cols = 1, rows * cols
            source, target = (source[0], source[1], cols), (target[0], target[1], cols)
        new = [*source, *target, rows, cols, wire, module, 0]
        if not (self._rows and _joined(self._rows[-1], new)):
            self._rows.append(new)

    def table(self) -> CopyTable:
        return np.array([tuple(row) for row in self._rows], dtype=COPY)


def _joined(last: list[int], new: list[int]) -> bool:
    """Extend `last` by `new` in place where that is one copy; says whether it was."""
    source, at, step, target, to, stride, rows, cols, wire, module, block = last
    same = (source, target, wire, module, block) == (new[0], new[3], new[8], new[9], new[10])
    if not same:
        return False
    if rows == 1 and new[6] == 1 and new[1] == at + cols and new[4] == to + cols:
        last[7] = last[2] = last[5] = cols + new[7]
        return True
    boxes = rows > 1 and new[6] > 1 and (step, stride, cols) == (new[2], new[5], new[7])
    if boxes and new[1] == at + rows * step and new[4] == to + rows * stride:
        last[6] = rows + new[6]
        return True
    return False


def target_sizes(table: CopyTable) -> tuple[np.ndarray, np.ndarray]:
    """(runs, elements of each) that every copy writes."""
    edge = np.where(table["wire"] == FLOAT32, np.maximum(table["block"], 1), 1)
    return -(-table["rows"] // edge), -(-table["cols"] // edge)


def num_elements(table: CopyTable) -> int:
    """Elements the table writes."""
    rows, cols = target_sizes(table)
    return int((rows * cols).sum())


def run(table: CopyTable, sources: Sequence[Any] | Any, targets: Sequence[Any] | Any) -> None:
    """Execute a table over flat 1-D arrays. The side that is the bucket is one flat uint8 array; the other a sequence
    indexed by tensor. Casting follows the target's dtype, through the wire dtype where a bucket is involved."""
    if not len(table):
        return
    taking, giving = _Side(sources), _Side(targets)
    if not isinstance(giving.flat(int(table["target"][0]), int(table["wire"][0])), np.ndarray):
        single = (table["rows"] == 1) & (table["block"] == 0)
        _run_together(table[single], taking, giving)
        table = table[~single]
    for row in table.tolist():
        source, at, step, target, to, stride, rows, cols, wire, _, block = row
        taken = _view(taking.flat(source, wire), at, step, rows, cols)
        if block:
            taken = _quantised(taken.reshape(rows, cols), WIRE_DTYPES[wire], block)
            rows, cols = taken.shape
        assign(_view(giving.flat(target, wire), to, stride, rows, cols), taken)


def _run_together(table: CopyTable, taking: _Side, giving: _Side) -> None:
    """torch's copies of single runs, one call for each dtype: few launches on a GPU, and little of Python a row."""
    import torch  # planning goes without

    for wire in np.unique(table["wire"]).tolist():
        rows = table[table["wire"] == wire]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            giving.runs(wire, rows["target"], rows["target_offset"], rows["cols"]),
            taking.runs(wire, rows["source"], rows["source_offset"], rows["cols"]),
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


def _quantised(weight: Any, wire: str, block: int) -> Any:
    from mrl.resharding.planner.fp8 import quantised  # torch: planning goes without

    return quantised(weight, wire, block)


def bucket_view(bucket: Any, wire: str) -> Any:
    """A flat uint8 bucket as an array of the wire dtype (bfloat16 and float8 as bit patterns in numpy)."""
    if isinstance(bucket, np.ndarray):
        dtype = numpy_dtype(wire)
        return bucket[: bucket.size // dtype.itemsize * dtype.itemsize].view(dtype)
    import torch

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
