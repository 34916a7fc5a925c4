"""How one Megatron parameter is made of checkpoint tensors, and which part of it a rank holds.

A family's table is a list of `Row`s: the whole (unsplit) parameter as blocks of checkpoint rows, and how it is split.
Everything else follows from the rows: the checkpoint's list of tensors, every rank's pieces, and the resharding plan.
Pure: imports no engine. Does not own the tables (one file per family) nor the rank coordinates (models/layout.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from mrl.errors import ConfigError
from mrl.models.layout import Layout
from mrl.models.manifest import LocalTensor, Piece

Split = Literal["none", "tp", "etp"]
Role = Literal["weight", "router", "correction"]
Experts = Literal["stacked", "sequential", "grouped"]
"""All in `experts.weight1` and `weight2` (models/megatron/experts.py), `experts.local_experts.{n}.linear_fc1.weight` (Megatron's local
spec), or `experts.linear_fc1.weight{n}` (Transformer Engine)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Which of Megatron's layer specs names the parameters."""

    fold_norms: bool = False
    """A norm followed by a column-parallel linear is that linear's `layer_norm_weight`."""
    experts: Experts = "stacked"
    """How a rank's experts are named."""
    whole_down_projections: bool = False
    """MLA's down-projections are duplicated over tp (Transformer Engine) instead of split by rows."""


TRAINER = Spec()
"""The trainer's own layers (models/megatron/layer_specs.py)."""
LOCAL = Spec(experts="sequential")
"""`get_gpt_layer_local_spec`: no Transformer Engine."""
TRANSFORMER_ENGINE = Spec(fold_norms=True, experts="grouped", whole_down_projections=True)
"""`get_gpt_layer_with_transformer_engine_spec` with moe_grouped_gemm."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, start + rows) of one checkpoint tensor."""

    tensor: str
    start: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One parameter before it is split.

    The parameter is the concatenation, over `blocks`, of the rank's share of each block; a block is the concatenation
    of its segments. So gate and up are two blocks (each rank holds its gate rows, then its up rows) and interleaved QKV
    is one block. `columns` is None for vectors. `dim` is the split dimension. `padded_rows` pads the only block.
    """

    name: str
    blocks: tuple[tuple[Segment, ...], ...]
    columns: int | None
    split: Split = "none"
    dim: int = 0
    role: Role = "weight"
    padded_rows: int | None = None


def whole(tensor: str, rows: int) -> tuple[tuple[Segment, ...], ...]:
    """A parameter that is one checkpoint tensor."""
    return ((Segment(tensor, 0, rows),),)


def cut(row: Row, *, parts: int, index: int, chunk: int, dtype: str, prefix: str = "") -> LocalTensor:
    """Part `index` of `parts` of a row as a local parameter named prefix + row.name.

    >>> cut(Row("w", whole("a", 8), 4, "tp"), parts=2, index=1, chunk=0, dtype="float32").pieces
    (Piece(tensor='a', start=(4, 0), shape=(4, 4), local_start=(0, 0)),)
    """
    name = prefix + row.name
    if row.dim == 1:
        return _cut_columns(row, parts=parts, index=index, chunk=chunk, dtype=dtype, name=name)
    pieces: list[Piece] = []
    offset = 0
    for block in row.blocks:
        size = row.padded_rows or sum(s.rows for s in block)
        share = divide(size, parts, what=f"rows of {name}")
        pieces.extend(
            _cut_block(block, low=index * share, high=(index + 1) * share, offset=offset, columns=row.columns)
        )
        offset += share
    shape = (offset,) if row.columns is None else (offset, row.columns)
    return LocalTensor(name=name, chunk=chunk, shape=shape, dtype=dtype, pieces=tuple(pieces))


def _cut_block(
    block: Sequence[Segment], *, low: int, high: int, offset: int, columns: int | None
) -> list[Piece]:
    pieces, at = [], 0
    for segment in block:
        first, last = max(low, at), min(high, at + segment.rows)
        if first < last:
            start, local, rows = segment.start + first - at, offset + first - low, last - first
            if columns is None:
                pieces.append(Piece(segment.tensor, (start,), (rows,), (local,)))
            else:
                pieces.append(Piece(segment.tensor, (start, 0), (rows, columns), (local, 0)))
        at += segment.rows
    return pieces


def _cut_columns(row: Row, *, parts: int, index: int, chunk: int, dtype: str, name: str) -> LocalTensor:
    assert row.columns is not None, f"{name}: a vector has no columns to split"
    share = divide(row.columns, parts, what=f"columns of {name}")
    pieces, at = [], 0
    for segment in (s for block in row.blocks for s in block):
        pieces.append(Piece(segment.tensor, (segment.start, index * share), (segment.rows, share), (at, 0)))
        at += segment.rows
    return LocalTensor(name=name, chunk=chunk, shape=(at, share), dtype=dtype, pieces=tuple(pieces))


def divide(value: int, parts: int, *, what: str) -> int:
    """value / parts, or a ConfigError that says what cannot be split."""
    if value % parts:
        raise ConfigError(
            f"{what}: {value} cannot be split into {parts} equal parts; choose a layout that divides it"
        )
    return value // parts


def chunk_layers(num_layers: int, layout: Layout, pp: int) -> tuple[range, ...]:
    """Global layer numbers of each model chunk of one pipeline rank.

    Chunk c of pipeline rank p is virtual stage c * pp_size + p. A remainder goes to the first virtual stages, one
    layer each (Megatron then needs its `pipeline_model_parallel_layout`).

    >>> chunk_layers(8, Layout(pp=2, vpp=2), 1)
    (range(2, 4), range(6, 8))
    """
    stages = layout.pp * layout.vpp
    if num_layers < stages:
        raise ConfigError(
            f"{num_layers} layers cannot fill pp x vpp = {layout.pp} x {layout.vpp} stages; lower pp or vpp"
        )
    share, rest = divmod(num_layers, stages)
    starts = [stage * share + min(stage, rest) for stage in range(stages + 1)]
    return tuple(range(starts[s], starts[s + 1]) for s in range(pp, stages, layout.pp))


def padded_vocab(vocab_size: int, *, tp: int, pad_vocab_to: int) -> int:
    """Rows of Megatron's embedding: vocab_size rounded up to a multiple of pad_vocab_to x tp.

    >>> padded_vocab(1000, tp=2, pad_vocab_to=128)
    1024
    """
    multiple = pad_vocab_to * tp
    return -(-vocab_size // multiple) * multiple
