"""Ranges of a parameter's elements as boxes of stored tensors: each element once, in place, uncopied."""

from __future__ import annotations

import functools
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mrl.training.checkpoint.shards import boxes_of, boxes_of_run

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_runs_boxes_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    first = data.draw(st.integers(0, whole.numel()))
    last = data.draw(st.integers(first, whole.numel()))
    boxes = list(boxes_of_run(shape, first, last))
    cut = [whole[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert torch.cat([torch.empty(0, dtype=whole.dtype), *cut]).tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def halves(key: str, weight: Tensor, replica: object, _: object, *, layer: int) -> list[ShardedTensor]:
    """Return gate and up of one of 3 layers, split in the stored [3, experts, 2 x rows, columns]."""
    return [
        ShardedTensor.from_rank_offsets(
            key, part, (0, layer, 3), (2, half, 2), replica_id=replica, prepend_axis_num=1
        )
        for half, part in enumerate(weight.view(3, 4, 5).chunk(2, dim=1))
    ]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), max_size=5), st.integers(0, 2))
def test_ranks_that_share_a_parameter_write_its_stored_tensor_once(cuts: list[int], layer: int) -> None:
    weight = torch.arange(60, dtype=torch.float32).view(12, 5)
    factory = ShardedTensorFactory("w", weight, functools.partial(halves, layer=layer), torch.cat, (0, 0, 0))
    stored, times = torch.full((3, 3, 4, 5), -1.0), torch.zeros(3, 3, 4, 5)
    ends = [0, *sorted(cuts), 60]
    for start, end in itertools.pairwise(ends):
        shard = weight.view(-1)[start:end].clone()  # a rank's elements, in separate memory
        for box in boxes_of(factory, shard, range(start, end), prefix="optimizer.state.exp_avg."):
            assert box.data is not None and box.key == "optimizer.state.exp_avg.w"
            assert box.data.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr(), "a copy"
            at = tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.local_shape, strict=True))
            stored[at], times[at] = box.data, times[at] + 1
    expected = torch.cat(list(weight.view(3, 4, 5).chunk(2, dim=1)), dim=1)
    assert torch.equal(stored[layer], expected) and times.sum() == 60 and times.max() == 1
