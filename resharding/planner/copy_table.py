"""Tables of strided copies, a plan's unit of work: their layout, and joining; `transfer/copies.py` runs them.

A row copies `rows` runs of `cols` elements. Offsets and strides count elements of the named tensor (each side
in its own dtype). Tensor index -1 is the bucket, seen as an array of the wire dtype.
"""

from __future__ import annotations

import numpy as np

from mrl.resharding.planner.manifest import WIRE_DTYPES

BUCKET = -1
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
"""`source_stride`, `target_stride`: elements between two runs. `wire`: index into WIRE_DTYPES. `module`:
index into the part's modules (-1 if the target is the bucket). `block`: 0, or the edge of the square blocks
by which the source, whole blocks, is quantised into values (wire float8_e4m3fn) or scales (wire float32; the
target then has one element per block, while `rows` and `cols` count the source's)."""

CopyTable = np.ndarray
"""A numpy array of dtype COPY."""

Side = tuple[int, int, int]
"""(tensor index, offset, stride): start of one side of a copy, and the distance between its runs."""


class CopyList:
    """Collects copies; joins a new one to the last if both sides continue it. Quantised copies stay boxes."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, source: Side, target: Side, *, rows: int, cols: int, wire: int, module: int, block: int = 0
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
    """Extend `last` by `new` in place if the two are one copy; return True if it did."""
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
    """Return (runs, elements per run) that every copy writes."""
    edge = np.where(table["wire"] == FLOAT32, np.maximum(table["block"], 1), 1)
    return -(-table["rows"] // edge), -(-table["cols"] // edge)
