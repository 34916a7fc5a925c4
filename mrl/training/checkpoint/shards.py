"""A rank's parameters and optimizer state as boxes of whole tensors, without moving or copying any of it.

Megatron's distributed optimizer stores of every parameter a row-major run of elements. A run is at most a few
boxes: the rest of a row, whole rows, the start of a row. So each rank writes and reads exactly its part, in
place, and the stored tensors are whole: any other layout splits them differently. Megatron's own formats
gather the state on one rank ("fully_reshardable"), or cannot be read with another tensor or pipeline split
("dp_reshardable").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mrl.resharding.planner.boxes import Box

Place = ShardedTensor | ShardedTensorFactory
STATE = "optimizer.state"
"""Prefix of optimizer-state keys; the state's name and the parameter's key follow."""


def sharded_weights(state: Mapping[str, Any]) -> dict[str, list[ShardedTensor]]:
    """Return a sharded state dict's tensors, as views, by key. Loading into them changes the model."""
    shards: dict[str, list[ShardedTensor]] = {}
    for tensor, place in sharded_places(state):
        flat = tensor.detach().view(-1)  # fails instead of copying
        shards.setdefault(place.key, []).extend(boxes_of(place, flat, range(flat.numel())))
    return shards


def sharded_states(
    part: Any,
    places: Mapping[Tensor, Any],
    held: list[tuple[Tensor, dict[str, Tensor]]],
    resting: Callable[[Tensor], Tensor],
) -> dict[str, list[ShardedTensor]]:
    """Return the master weights and moments of one of Megatron's distributed optimizers on this rank, by key.

    `places` are the parameters' own ShardedTensors and factories. `held` receives each parameter's states,
    for restore_states() after loading into them. `resting` returns the tensor with a state's bytes.
    """
    shards: dict[str, list[ShardedTensor]] = {}
    for parameter in part.model_param_gbuf_map:
        span, place = part._get_model_param_range_map(parameter)["param"], places[parameter]
        states = {name: resting(state) for name, state in _states(part, parameter).items()}
        held.append((parameter, states))
        unreplicated = dataclasses.replace(place, replica_id=(*place.replica_id[:2], 0))
        for name, flat in states.items():
            boxes = boxes_of(
                unreplicated, flat.detach(), range(span.start, span.end), prefix=f"{STATE}.{name}."
            )
            shards.setdefault(f"{STATE}.{name}.{place.key}", []).extend(boxes)
    return shards


@torch.no_grad()
def restore_states(part: Any, held: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Give loaded states to an optimizer that stores them in another form; otherwise they are in place."""
    for parameter, states in held if _narrow(part) else ():
        part._set_main_param_and_optimizer_states(parameter, states)


def sharded_places(state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Place]]:
    """Yield each parameter and buffer of a chunk's sharded state dict, and its place in the checkpoint."""
    for value in nested_values(dict(state)):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            assert value.data is not None
            yield value.data, value


def boxes_of(place: Place, flat: Tensor, span: range, *, prefix: str = "") -> list[ShardedTensor]:
    """Return the elements `span` of a parameter as views at their places in stored tensors. `flat`
    [len(span)] contains them in row-major order."""
    return [shard for piece in _pieces(place) for shard in _cut(piece, flat, span, prefix)]


def _states(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's master weight and moments by Megatron's names; "step" is in the groups."""
    states = part._get_main_param_and_optimizer_states(parameter)
    to_host = _narrow(part)
    return {name: state.cpu() if to_host else state for name, state in states.items() if state.dim() == 1}


def _narrow(part: Any) -> bool:
    """Return True if an optimizer's states are narrower than float32, and therefore copied here."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def _pieces(place: Place) -> list[ShardedTensor]:
    """Return the parts of a parameter stored separately (gate and up), as views without memory."""
    assert place.data is not None
    like = torch.empty(place.data.shape, dtype=torch.float32, device="meta")
    if isinstance(place, ShardedTensor):
        return [dataclasses.replace(place, data=like, dtype=like.dtype)]
    pieces = list(nested_values([place.build_fn(place.key, like, place.replica_id, None)]))
    for piece in pieces:
        assert piece.data.untyped_storage()._cdata == like.untyped_storage()._cdata, (
            f"{place.key}: its parts are copies, not views"
        )
    return pieces


def _cut(piece: ShardedTensor, flat: Tensor, span: range, prefix: str) -> Iterator[ShardedTensor]:
    view, lead = piece.data, piece.prepend_axis_num
    assert view is not None
    shape, strides = (1,) * lead + tuple(view.shape), (0,) * lead + tuple(view.stride())
    offset = int(view.storage_offset())
    first, last = (_below(at - offset, shape, strides) for at in (span.start, span.stop))
    for start, sizes in boxes_of_run(shape, first, last):
        at = offset + sum(s * stride for s, stride in zip(start, strides, strict=True)) - span.start
        yield ShardedTensor(
            key=prefix + piece.key,
            data=flat.as_strided(sizes, strides, flat.storage_offset() + at),
            dtype=flat.dtype,
            local_shape=sizes,
            global_shape=piece.global_shape,
            global_offset=tuple(g + s for g, s in zip(piece.global_offset, start, strict=True)),
            axis_fragmentations=None,
            replica_id=piece.replica_id,
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )


def _below(position: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements of a row-major view that are in memory before `position`, from its first.

    >>> [_below(p, (2, 2), (10, 1)) for p in (0, 1, 2, 9, 10, 11, 99)] [0, 1, 2, 2, 2, 3, 4]
    """
    if position <= 0:
        return 0
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes:
        return math.prod(shape)
    size, stride, inner = shape[axes[0]], strides[axes[0]], shape[axes[0] + 1 :]
    rows = min(position // stride, size)
    whole = rows * math.prod(inner)
    return whole if rows == size else whole + _below(position - rows * stride, inner, strides[axes[0] + 1 :])


def boxes_of_run(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield the elements first..last - 1 of a row-major array as boxes, in order, at most two per axis.

    >>> list(boxes_of_run((3, 4), 2, 9)) [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row, zeros = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    whole, end = -(-first // row), last // row
    if whole > end:  # inside one row
        yield from _in_row(end, shape, first, last)
        return
    yield from _in_row(whole - 1, shape, first, whole * row)
    if whole < end:
        yield (whole, *zeros), (end - whole, *shape[1:])
    yield from _in_row(end, shape, end * row, last)


def _in_row(number: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for start, sizes in boxes_of_run(shape[1:], first - number * row, last - number * row):
        yield (number, *start), (1, *sizes)
