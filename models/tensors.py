"""Describe tensors by name: a checkpoint's, those of one trainer or engine rank, and their correspondence.

A checkpoint tensor is a tensor of the Hugging Face folder. A `TensorSlice` states that a box of a parameter
equals a box of a checkpoint tensor (same shape, element for element). A `LocalTensor` is one parameter of one
rank with all its pieces; elements without a piece are padding. Loading, export, the gather path and the plan
of a weight sync all use this description.

A family's name table (models/families) is a list of `ParameterRows`: the whole Megatron parameter as blocks
of checkpoint rows, and its split. Checkpoint tensors and ranks' pieces follow. Imports no engine.

Some folders (gpt-oss) store all experts of a layer in one tensor, each of them transposed. Here such a tensor
is the concatenation of the experts' rows, as in trainer and engine; its *stack* describes the folder's form.
Only code that reads or writes folders, or feeds an engine's loaders, converts between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from mrl.models.layout import divide

BLOCK = 128
"""Edge of the square blocks that share a scale in published float8 folders and vLLM's float8 kernels."""
SCALES = "_scale_inv"
"""Suffix of the tensor with the scales of a float8 tensor, one per block."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlice:
    """local[local_start : local_start + shape] == checkpoint[tensor][start : start + shape], per dimension.

    Example: rank 1 of tp 2 has rows 64..127 of an embedding [128, 32]:
    Piece("model.embed_tokens.weight", start=(64, 0), shape=(64, 32), local_start=(0, 0)).
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalTensor:
    """One parameter of one rank."""

    name: str
    """Megatron name inside its model chunk (local layer numbers)."""
    chunk: int
    """Index of the model chunk on this rank (virtual pipeline); 0 without virtual pipeline."""
    shape: tuple[int, ...]
    dtype: str
    """torch name without the prefix: float32, bfloat16."""
    pieces: tuple[TensorSlice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the Hugging Face folder."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 0
    """Parts that the folder stacks along a leading axis, matrices transposed; 0: stored as it is."""
    turned: bool = False
    """True if a folder that packs experts into one tensor stores each transposed."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the folder.

        >>> CheckpointTensor("down_proj", (8 * 64, 32), "bfloat16", stack=8).stored_shape
        (8, 32, 64)
        """
        if not self.stack:
            return self.shape
        rows, *columns = self.shape
        return (self.stack, *columns, rows // self.stack)

    def as_stored(self, values: Any) -> Any:
        """Return the view of torch `values` [*shape] in the folder's form."""
        if not self.stack:
            return values
        parts = values.unflatten(0, (self.stack, -1))
        return parts.transpose(1, 2) if len(self.shape) > 1 else parts


Split = Literal["none", "tp", "etp"]
Role = Literal["weight", "correction"]
ExpertNaming = Literal["stacked", "sequential", "grouped"]
"""Names of a rank's experts: `experts.weight1` and `weight2` for all (models/megatron/expert_layer.py),
`experts.local_experts.{n}.linear_fc1.weight` (Megatron's local spec), or `experts.linear_fc1.weight{n}` (TE).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Parameter names of one of Megatron's layer specs."""

    fold_norms: bool = False
    """True if a norm before a column-parallel linear is that linear's `layer_norm_weight`."""
    experts: ExpertNaming = "stacked"
    """Naming of a rank's experts."""
    whole_down_projections: bool = False
    """True if MLA's down-projections are replicated over tp (Transformer Engine), not split by rows."""


TRAINER = Spec()
"""The trainer's layers without Transformer Engine (models/megatron/layer_specs.py)."""
LOCAL = Spec(experts="sequential")
"""`get_gpt_layer_local_spec`: no Transformer Engine."""
TRANSFORMER_ENGINE = Spec(fold_norms=True, experts="grouped", whole_down_projections=True)
"""`get_gpt_layer_with_transformer_engine_spec` with moe_grouped_gemm."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRows:
    """Rows [start, start + rows) of one checkpoint tensor."""

    tensor: str
    start: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRows:
    """One parameter before it is split.

    The parameter is the concatenation, over `blocks`, of the rank's share of each block; a block is the
    concatenation of its segments. So gate and up are two blocks (each rank has its gate rows, then its up
    rows), and interleaved QKV is one block. `columns` is None for vectors, and a tuple of all further sizes
    for more than two dimensions. `dim` is the split dimension. `padded_rows` pads the only block. `stack` is
    that of the checkpoint tensors.
    """

    name: str
    blocks: tuple[tuple[CheckpointRows, ...], ...]
    columns: int | tuple[int, ...] | None
    split: Split = "none"
    dim: int = 0
    role: Role = "weight"
    padded_rows: int | None = None
    stack: int = 0

    @property
    def trailing(self) -> tuple[int, ...]:
        """Sizes after the first."""
        if self.columns is None:
            return ()
        return self.columns if isinstance(self.columns, tuple) else (self.columns,)


def whole_tensor(tensor: str, rows: int) -> tuple[tuple[CheckpointRows, ...], ...]:
    """Return the blocks of a parameter that is one checkpoint tensor."""
    return ((CheckpointRows(tensor, 0, rows),),)


def shard_row(
    row: ParameterRows, *, parts: int, index: int, chunk: int, dtype: str, prefix: str = ""
) -> LocalTensor:
    """Return part `index` of `parts` of a row as a local parameter named prefix + row.name.

    >>> row = ParameterRows("w", whole_tensor("a", 8), 4, "tp")
    >>> shard_row(row, parts=2, index=1, chunk=0, dtype="float32").pieces
    (TensorSlice(tensor='a', start=(4, 0), shape=(4, 4), local_start=(0, 0)),)
    """
    name = prefix + row.name
    if row.dim == 1:
        return _cut_columns(row, parts=parts, index=index, chunk=chunk, dtype=dtype, name=name)
    pieces: list[TensorSlice] = []
    offset = 0
    for block in row.blocks:
        size = row.padded_rows or sum(s.rows for s in block)
        share = divide(size, parts, name=f"rows of {name}")
        pieces.extend(
            _cut_block(
                block, low=index * share, high=(index + 1) * share, offset=offset, trailing=row.trailing
            )
        )
        offset += share
    return LocalTensor(
        name=name, chunk=chunk, shape=(offset, *row.trailing), dtype=dtype, pieces=tuple(pieces)
    )


def _cut_block(
    block: Sequence[CheckpointRows], *, low: int, high: int, offset: int, trailing: tuple[int, ...]
) -> list[TensorSlice]:
    pieces, position, zeros = [], 0, (0,) * len(trailing)
    for segment in block:
        first, last = max(low, position), min(high, position + segment.rows)
        if first < last:
            start, local, rows = segment.start + first - position, offset + first - low, last - first
            pieces.append(TensorSlice(segment.tensor, (start, *zeros), (rows, *trailing), (local, *zeros)))
        position += segment.rows
    return pieces


def _cut_columns(
    row: ParameterRows, *, parts: int, index: int, chunk: int, dtype: str, name: str
) -> LocalTensor:
    assert isinstance(row.columns, int), f"{name}: only a matrix has columns to split"
    share = divide(row.columns, parts, name=f"columns of {name}")
    pieces, position = [], 0
    for segment in (s for block in row.blocks for s in block):
        pieces.append(
            TensorSlice(segment.tensor, (segment.start, index * share), (segment.rows, share), (position, 0))
        )
        position += segment.rows
    return LocalTensor(name=name, chunk=chunk, shape=(position, share), dtype=dtype, pieces=tuple(pieces))
