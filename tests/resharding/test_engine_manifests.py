"""Engine manifests without an engine: worked boxes, traces of views, refusals."""

import pytest
import torch

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.engine_rows import Shard
from mrl.models.layout import Layout
from mrl.models.tensors import CheckpointTensor, TensorSlice
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.engine_manifests import TraceRecord
from mrl.resharding.planner.manifest import RankManifest
from tests.resharding.worlds import QWEN3_MOE


def tensor(manifest, name: str):
    return next(t for t in manifest.tensors if t.name == name)


def test_key_value_heads_are_replicated_where_tp_exceeds_them():
    manifests = engine_manifests.engine_rank_manifests(QWEN3_MOE, Layout(tp=4))
    pieces = [tensor(m, "model.layers.0.self_attn.qkv_proj.weight").pieces for m in manifests]
    assert [p[1].start for p in pieces] == [(0, 0), (0, 0), (4, 0), (4, 0)]
    assert [p[0].start for p in pieces] == [(0, 0), (8, 0), (16, 0), (24, 0)]


def test_vocabulary_is_padded_to_64_and_replicas_are_equal():
    manifests = engine_manifests.engine_rank_manifests(QWEN3_MOE, Layout(tp=2, dp=2))
    assert [m.tensors[0].shape for m in manifests[:2]] == [(64, 16), (64, 16)]
    assert [m.tensors[0].pieces[0].shape for m in manifests[:2]] == [(64, 16), (36, 16)]
    assert [m.digest for m in manifests[:2]] == [m.digest for m in manifests[2:]]


def test_experts_are_placed_as_the_engine_places_them():
    placement = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    for count, ep in ((8, 2), (10, 4), (7, 3)):
        for rank in range(ep):
            local, where, _ = placement.determine_expert_map(ep, rank, count)
            mine = Shard(1, 0, ep, rank).experts(count)
            assert len(mine) == local and [int(where[e]) for e in mine] == list(range(local))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, ep=3, dp=3), Layout(tp=3)])
def test_layouts_an_engine_does_not_have_are_refused(layout):
    with pytest.raises(ConfigError):
        engine_manifests.engine_rank_manifests(QWEN3_MOE, layout)


CHECKPOINT = [CheckpointTensor("a", (8, 6), "bfloat16"), CheckpointTensor("bias", (4,), "float32")]


def test_views_become_boxes():
    """Columns 2..3 of rows 4..7 of a [8, 6] into expert 1 of a [2, 4, 2]."""
    records = [
        ("w", 8, (4, 2), (2, 1), "a", 4 * 6 + 2, (6, 1)),
        ("w", 0, (4, 2), (2, 1), "a", 2, (6, 1)),
        ("b", 0, (4,), (1,), "bias", 0, (1,)),
    ]
    parameters = {"w": ((2, 4, 2), "bfloat16"), "b": ((4,), "float32"), "tied": ((8, 6), "bfloat16")}
    manifest = engine_manifests.from_trace(records, parameters, CHECKPOINT, aliases=("tied",))
    assert manifest.tensors[0].pieces == (
        TensorSlice("a", (0, 2), (4, 2), (0, 0, 0)),
        TensorSlice("a", (4, 2), (4, 2), (1, 0, 0)),
    )
    assert (
        manifest.tensors[1].pieces == (TensorSlice("bias", (0,), (4,), (0,)),) and len(manifest.tensors) == 2
    )


STACKED = [
    CheckpointTensor("s", (3 * 4, 2), "bfloat16", stack=3),
    CheckpointTensor("v", (3 * 4,), "bfloat16", stack=3),
]


def test_a_transposed_copy_out_of_a_stack_is_a_box_for_each_of_its_parts():
    """Parts 1 and 2 of a folder's [3, 2, 4] into a [2, 4, 2], and their biases of a [3, 4] into a [2, 4]."""
    assert [tensor.stored_shape for tensor in STACKED] == [(3, 2, 4), (3, 4)]
    weight, bias = (t.as_stored(torch.empty(t.shape))[1:] for t in STACKED)
    weight = weight.permute(0, 2, 1)
    records = [
        TraceRecord("w", 0, (2, 4, 2), (8, 2, 1), "s", weight.storage_offset(), weight.stride()),
        TraceRecord("b", 0, (2, 4), (4, 1), "v", bias.storage_offset(), bias.stride()),
    ]
    parameters = {"w": ((2, 4, 2), "bfloat16"), "b": ((2, 4), "bfloat16")}
    manifest = engine_manifests.from_trace(records, parameters, STACKED)
    assert manifest.unplanned == ()
    assert manifest.tensors[0].pieces == (
        TensorSlice("s", (4, 0), (4, 2), (0, 0, 0)),
        TensorSlice("s", (8, 0), (4, 2), (1, 0, 0)),
    )
    assert manifest.tensors[1].pieces == (
        TensorSlice("v", (4,), (4,), (0, 0)),
        TensorSlice("v", (8,), (4,), (1, 0)),
    )


def test_a_copy_that_leaves_a_stack_as_the_folder_has_it_is_no_box():
    (weight,) = (STACKED[0].as_stored(torch.empty(STACKED[0].shape)),)
    record = TraceRecord("m.w", 0, (3, 2, 4), (8, 4, 1), "s", 0, weight.stride())
    assert engine_manifests.from_trace([record], {"m.w": ((3, 2, 4), "bfloat16")}, STACKED).unplanned == (
        "s",
    )


def test_what_a_transposed_load_fills_comes_whole_with_its_module_and_what_shares_its_tensors():
    parameters = {
        "x.w": ((6, 8), "bfloat16"), "x.bias": ((4,), "float32"),
        "y.bias": ((4,), "float32"), "z.c": ((3,), "int32"),
    }  # fmt: skip
    records = [
        ("x.w", 0, (8, 6), (1, 8), "a", 0, (6, 1)),
        ("x.bias", 0, (4,), (1,), "bias", 0, (1,)),
        ("y.bias", 0, (4,), (1,), "bias", 0, (1,)),
        ("z.c", 0, (3,), (1,), "c", 0, (1,)),
    ]
    manifest = engine_manifests.from_trace(
        records, parameters, [*CHECKPOINT, CheckpointTensor("c", (3,), "int32")]
    )
    assert manifest.unplanned == ("a", "bias") and [t.name for t in manifest.tensors] == ["z.c"]
    assert manifest.digest != RankManifest.of(0, manifest.tensors).digest


@pytest.mark.parametrize("name", ["x.never", "y.never"])
def test_a_parameter_that_nothing_fills_is_named(name: str) -> None:
    """A missing bias is named even if the module's weight is filled."""
    parameters = {name: ((4,), "float32"), "y.b": ((4,), "float32")}
    with pytest.raises(WeightSyncError, match=rf"no tensor of the trainer fills {name} \(4,\)"):
        engine_manifests.from_trace([("y.b", 0, (4,), (1,), "bias", 0, (1,))], parameters, CHECKPOINT)
