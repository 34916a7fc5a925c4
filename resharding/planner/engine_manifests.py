"""Engine manifests: where checkpoint boxes go on every engine rank, from a layout or the loaders' trace.

Pure: a live engine is a list of the copies its own loaders made. vLLM's layout is in models/engine_rows.py
and the families; the engine's worker does the tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.engine_rows import Shard
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import CheckpointTensor, LocalTensor, TensorSlice
from mrl.resharding.planner.manifest import RankManifest, module_of, whole_modules


def engine_rank_manifests(
    hf_config: Mapping[str, Any], layout: Layout, *, dtype: str = "bfloat16"
) -> list[RankManifest]:
    """Build the manifest of every engine rank without an engine.

    `layout.tp` is the engine's tensor-parallel size, `layout.dp` counts engines. `layout.ep` = 1 splits
    experts by tp; else each run of ep consecutive ranks shares the experts whole (ep is a multiple of tp:
    expert parallel over tp and data parallel). Raises ConfigError for axes that a rollout does not have.
    """
    if layout.pp * layout.cp * layout.etp > 1:
        raise ConfigError(f"a rollout layout has tp, ep and dp only, got {layout}")
    if layout.ep > 1 and layout.ep % layout.tp:
        raise ConfigError(
            f"rollout ep = {layout.ep} must be a multiple of tp = {layout.tp}: vLLM spreads experts over tp "
            "x dp"
        )
    family = family_of(hf_config)
    by_shard: dict[Shard, RankManifest] = {}
    manifests = []
    for rank in range(layout.world_size):
        shard = Shard(layout.tp, rank % layout.tp, layout.ep, rank % layout.ep)
        if shard not in by_shard:
            by_shard[shard] = RankManifest.of(rank, family.engine_tensors(hf_config, shard, dtype=dtype))
        manifests.append(dataclasses.replace(by_shard[shard], rank=rank))
    return manifests


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRecord:
    """One copy of a loader between views: parameter[offset, strides] <- checkpoint tensor[offset, strides].

    Offsets and strides are in elements of the whole tensors; `shape` is that of both views.
    """

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tensor: str
    tensor_offset: int
    tensor_strides: tuple[int, ...]


def from_trace(
    records: Iterable[TraceRecord | Sequence[Any]],
    parameters: Mapping[str, tuple[Sequence[int], str]],
    checkpoint: Iterable[CheckpointTensor],
    *,
    rank: int = 0,
    aliases: Collection[str] = (),
) -> RankManifest:
    """Build the manifest of one live rank.

    A parameter that is not filled by boxes (a transposed or re-strided load) makes its whole module
    `unplanned`: the tensors that fill the module come whole.

    Args:
        parameters: every parameter's loader-layout shape and dtype, in the model's order.
        checkpoint: tensors that the loaders were fed.
        aliases: names that share another parameter's storage (a tied output layer); left out.

    Raises:
        WeightSyncError: nothing fills a parameter: the trainer lacks it (a bias, another layer).
    """
    shapes = {tensor.name: tensor.shape for tensor in checkpoint}
    pieces: dict[str, list[TensorSlice]] = {name: [] for name in parameters if name not in aliases}
    feeds: dict[str, set[str]] = {}
    filled: set[str] = set()
    unplannable: set[str] = set()
    for record in records:
        record = record if isinstance(record, TraceRecord) else TraceRecord(*record)
        if record.parameter not in pieces or record.tensor not in shapes:
            raise WeightSyncError(
                f"engine rank {rank}: the loaders copied {record.tensor} -> {record.parameter}: unknown name"
            )
        filled.add(record.parameter)
        feeds.setdefault(module_of(record.parameter), set()).add(record.tensor)
        record_pieces = _pieces(record, tuple(parameters[record.parameter][0]), shapes[record.tensor])
        if None in record_pieces:
            unplannable.add(module_of(record.parameter))
        pieces[record.parameter] += [piece for piece in record_pieces if piece is not None]
    if unfilled := [f"{n} {tuple(parameters[n][0])}" for n in pieces if n not in filled]:
        raise WeightSyncError(
            f"engine rank {rank}: no tensor of the trainer fills {', '.join(unfilled[:20])}"
            + (f" and {len(unfilled) - 20} more" if len(unfilled) > 20 else "")
        )
    whole = whole_modules(feeds, unplannable)
    tensors = [
        LocalTensor(name, 0, tuple(shape), dtype, tuple(sorted(pieces[name], key=lambda p: p.local_start)))
        for name, (shape, dtype) in parameters.items()
        if name in pieces and module_of(name) not in whole
    ]
    return RankManifest.of(rank, tensors, {tensor for module in whole for tensor in feeds[module]})


def _pieces(
    record: TraceRecord, local_shape: tuple[int, ...], full_shape: tuple[int, ...]
) -> list[TensorSlice | None]:
    """Return the boxes of a copy, and None for any part that is not a box.

    One box, or one per index of its first axis if only the parameter has that axis (stacked experts)."""
    piece = _piece(record, local_shape, full_shape)
    if piece is not None or len(record.shape) <= len(full_shape):
        return [piece]
    count, *shape = record.shape
    parts = [
        dataclasses.replace(
            record,
            offset=record.offset + index * record.strides[0],
            shape=tuple(shape),
            strides=record.strides[1:],
            tensor_offset=record.tensor_offset + index * record.tensor_strides[0],
            tensor_strides=record.tensor_strides[1:],
        )
        for index in range(count)
    ]
    return [_piece(part, local_shape, full_shape) for part in parts]


def _piece(
    record: TraceRecord, local_shape: tuple[int, ...], full_shape: tuple[int, ...]
) -> TensorSlice | None:
    start = _unravel(record.tensor_offset, full_shape)
    local_start = _unravel(record.offset, local_shape)
    shape = _box(record.shape, record.tensor_strides, full_shape)
    local = _box(record.shape, record.strides, local_shape)
    if shape is None or local is None:
        return None
    extra = len(local) - len(shape)
    if extra < 0 or local != (1,) * extra + shape:
        return None
    return TensorSlice(record.tensor, start, shape, local_start)


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        offset, at = divmod(offset, size)
        index.append(at)
    return tuple(reversed(index))


def _box(view: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return a view's extents in a contiguous tensor of `shape`, by dimension; None if it is not a box."""
    views = [(size, stride) for size, stride in zip(view, strides, strict=True) if size > 1]
    extents, step = [], 1
    for size in reversed(shape):
        if views and views[-1][1] == step and views[-1][0] <= size:
            extents.append(views.pop()[0])
        else:
            extents.append(1)
        step *= size
    return None if views else tuple(reversed(extents))
