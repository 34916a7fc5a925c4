"""One slot's part of a plan for its receiver: copies from leases and the bucket, by module. Pure.

The trainer makes the tables once from the plan and sends them as plain bytes (numpy rows, no pickle). The
receiver checks them against both memories before it copies any element.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.errors import WeightSyncError
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner.cells import Cell
from mrl.resharding.planner.copy_table import BUCKET, COPY, CopyTable, target_sizes
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES
from mrl.resharding.planner.slot_plan import EngineWindow, SlotPart
from mrl.resharding.planner.whole_tensors import whole_tensor_of


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A tensor that the tables write: an engine parameter in loader layout, or a checkpoint tensor that comes
    whole (then `whole_tensors.whole_tensor_of` returns its name)."""

    name: str
    dtype: str
    """Name in torch, without prefix."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LeasedTensor:
    """A trainer tensor inside one of the leased buffers."""

    buffer: int
    byte_offset: int
    dtype: str
    num_elements: int


@dataclasses.dataclass(frozen=True)
class Tables:
    """Work of one slot's engine rank in a session, window by window, and the cells that prove it."""

    sources: tuple[LeasedTensor, ...]
    targets: tuple[Target, ...]
    modules: tuple[str, ...]
    windows: tuple[EngineWindow, ...]
    cells: tuple[Cell, ...] = ()
    """Cells that the copies write, cut as the proof needs them."""
    neighbours: tuple[int, ...] = ()
    """Engine ranks whose receive buckets the local copies read, after all sources (`SlotPart`)."""

    def lent_bytes(self, first_source: int) -> int:
        """Return the bytes, in the engine's dtypes, that come from leased tensors from `first_source` on."""
        return sum(self._bytes_of(w.local[w.local["source"] >= first_source]) for w in self.windows)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the checkpoint tensors that come whole."""
        whole = (t for t in self.targets if whole_tensor_of(t.name))
        return sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in whole)

    @property
    def num_bytes(self) -> int:
        """Bytes written into the engine, in its dtypes."""
        return sum(self._bytes_of(table) for w in self.windows for table in (w.local, w.unpack))

    def _bytes_of(self, table: CopyTable) -> int:
        sizes = np.array([DTYPE_BYTES[t.dtype] for t in self.targets], np.int64)
        return int((math.prod(target_sizes(table)) * sizes[table["target"]]).sum()) if len(table) else 0

    def written(self) -> list[int]:
        """Return the number of elements that the tables write into each target."""
        counts = np.zeros(len(self.targets), np.int64)
        for window in self.windows:
            for table in (window.local, window.unpack):
                np.add.at(counts, table["target"], math.prod(target_sizes(table)))
        return counts.tolist()

    def encode(self) -> dict[str, Any]:
        """Return the tables as JSON values."""
        return {
            "sources": [dataclasses.astuple(s) for s in self.sources],
            "targets": [[t.name, t.dtype, list(t.shape)] for t in self.targets],
            "modules": list(self.modules),
            "windows": [
                [_pack(w.local), _pack(w.unpack), list(w.opens), list(w.closes), w.bucket_bytes]
                for w in self.windows
            ],
            "cells": [[c.tensor, list(c.start), list(c.shape)] for c in self.cells],
            "neighbours": list(self.neighbours),
        }

    @classmethod
    def decode(cls, data: dict[str, Any]) -> Tables:
        """Read what `Tables.encode` makes; raise WeightSyncError for anything else."""
        try:
            return cls(
                tuple(LeasedTensor(*row) for row in data["sources"]),
                tuple(Target(name, dtype, tuple(shape)) for name, dtype, shape in data["targets"]),
                tuple(data["modules"]),
                tuple(
                    EngineWindow(_unpack(local), _unpack(unpack), tuple(opens), tuple(closes), bucket_bytes)
                    for local, unpack, opens, closes, bucket_bytes in data["windows"]
                ),
                tuple(Cell(name, tuple(start), tuple(shape)) for name, start, shape in data["cells"]),
                tuple(data["neighbours"]),
            )
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise WeightSyncError(f"malformed plan tables: {error!r}") from error

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of all tables."""
        plain = (self.sources, self.targets, self.modules, self.cells, self.neighbours)
        state = hashlib.sha256(repr(plain).encode())
        for window in self.windows:
            state.update(window.local.tobytes() + b"|" + window.unpack.tobytes())
            state.update(repr((window.opens, window.closes, window.bucket_bytes)).encode())
        return state.hexdigest()

    def check(self, lease_bytes: Sequence[int], bucket_bytes: int) -> None:
        """Raise WeightSyncError if a copy could leave its memory or a target element is not written once.

        Padding at a tensor's end is not written at all."""
        for number, source in enumerate(self.sources):
            size = source.num_elements * DTYPE_BYTES[source.dtype]
            inside = 0 <= source.buffer < len(lease_bytes) and source.byte_offset >= 0
            if not inside or source.byte_offset + size > lease_bytes[source.buffer]:
                raise WeightSyncError(
                    f"leased tensor {number} ({source}) leaves the leased buffers {list(lease_bytes)}"
                )
        wires = np.array([DTYPE_BYTES[d] for d in WIRE_DTYPES], np.int64)
        lengths = np.array([s.num_elements for s in self.sources], np.int64)
        lengths = np.concatenate([lengths, np.tile(bucket_bytes // wires, len(self.neighbours))])
        capacities = np.array([math.prod(t.shape) for t in self.targets], np.int64)
        for number, window in enumerate(self.windows):
            if not 0 <= window.bucket_bytes <= bucket_bytes:
                raise WeightSyncError(
                    f"window {number} fills {window.bucket_bytes} bytes of a bucket of {bucket_bytes}"
                )
            bucket = window.bucket_bytes // wires
            for table in (window.local, window.unpack):
                _inside(table, number, table is window.unpack, lengths, capacities, bucket)
        if bad := [
            t.name for t, w, r in zip(self.targets, self.written(), capacities, strict=True) if not 0 < w <= r
        ]:
            raise WeightSyncError(
                f"the plan does not write {len(bad)} engine parameters exactly once: {bad[:6]}"
            )


def tables_of(part: SlotPart, leased: Sequence[LeasedTensor], cells: Sequence[Cell] = ()) -> Tables:
    """Build a part's tables. `leased`: places of the tensors of the part's lenders, in its order."""
    if len(leased) != part.num_sources:
        raise WeightSyncError(f"{len(leased)} leased tensors for a part with {part.num_sources} sources")
    return Tables(
        tuple(leased),
        tuple(Target(t.name, t.dtype, t.shape) for t in part.engine_tensors),
        part.modules,
        part.windows,
        tuple(cells),
        part.neighbours,
    )


def leased_tensors(located: Sequence[tuple[LocalTensor, Any, int, int]]) -> list[LeasedTensor]:
    """Build the leased tensors from a trainer's (tensor, view, buffer index, byte offset) rows."""
    return [LeasedTensor(buffer, offset, t.dtype, math.prod(t.shape)) for t, _, buffer, offset in located]


def _inside(
    table: CopyTable,
    window: int,
    from_bucket: bool,
    lengths: np.ndarray,
    capacities: np.ndarray,
    bucket: np.ndarray,
) -> None:
    if not len(table):
        return
    sides = (
        (table["source"] == BUCKET)
        if from_bucket
        else (table["source"] >= 0) & (table["source"] < len(lengths))
    )
    valid = sides & (table["target"] >= 0) & (table["target"] < len(capacities))
    valid &= (
        (table["wire"] >= 0) & (table["wire"] < len(bucket)) & (table["rows"] >= 1) & (table["cols"] >= 1)
    )
    valid &= (table["block"] >= 0) & ((table["block"] == 0) | (not from_bucket))
    if valid.all():
        span = (table["rows"] - 1) * table["source_stride"] + table["cols"]
        end = table["source_offset"] + span
        limit = bucket[table["wire"]] if from_bucket else lengths[table["source"]]
        valid &= (table["source_offset"] >= 0) & (table["source_stride"] >= table["cols"]) & (end <= limit)
        rows, cols = target_sizes(table)
        end = table["target_offset"] + (rows - 1) * table["target_stride"] + cols
        valid &= (table["target_offset"] >= 0) & (table["target_stride"] >= cols)
        valid &= end <= capacities[table["target"]]
    if not valid.all():
        raise WeightSyncError(f"window {window}: copy {table[np.argmin(valid)]} leaves its memory")


def _pack(table: CopyTable) -> str:
    return base64.b64encode(zlib.compress(table.tobytes(), 1)).decode()


def _unpack(text: str) -> CopyTable:
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=COPY)
