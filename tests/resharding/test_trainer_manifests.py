"""Trainer manifests from layouts: every checkpoint element is held, replicas are equal, worked boxes."""

import dataclasses

import numpy as np
import pytest

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout, chunk_layers
from mrl.models.tensors import LOCAL, TRANSFORMER_ENGINE
from mrl.resharding.planner import trainer_manifests
from tests.resharding.live_manifests import from_model
from tests.resharding.worlds import FAMILIES, QWEN3_MOE, box, random_config


def pieces(manifest, name: str, chunk: int = 0):
    return next(t for t in manifest.tensors if t.name == name and t.chunk == chunk).pieces


def test_qkv_is_interleaved_by_query_group():
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2))[1]
    found = pieces(manifest, "decoder.layers.0.self_attention.linear_qkv.weight")
    assert [(p.tensor.split(".")[4], p.start, p.shape, p.local_start) for p in found] == [
        ("q_proj", (16, 0), (16, 16), (0, 0)),
        ("k_proj", (4, 0), (4, 16), (16, 0)),
        ("v_proj", (4, 0), (4, 16), (20, 0)),
    ]


def test_tp_above_the_groups_cuts_through_a_group():
    """Two groups of [16 q, 4 k, 4 v] rows over four ranks: 12 rows each, no row twice."""
    found = [
        pieces(m, "decoder.layers.0.self_attention.linear_qkv.weight")
        for m in trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=4))
    ]
    assert [[(p.tensor.split(".")[4], p.start[0], p.shape[0]) for p in rank] for rank in found[:2]] == [
        [("q_proj", 0, 12)],
        [("q_proj", 12, 4), ("k_proj", 0, 4), ("v_proj", 0, 4)],
    ]


def test_a_rank_holds_its_gate_rows_then_its_up_rows():
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2, ep=1, etp=2), spec=LOCAL)[1]
    found = pieces(manifest, "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    names = [p.tensor.removeprefix("model.layers.0.mlp.experts.3.") for p in found]
    assert names == ["gate_proj.weight", "up_proj.weight"]
    assert [(p.start, p.shape, p.local_start) for p in found] == [
        ((4, 0), (4, 16), (0, 0)),
        ((4, 0), (4, 16), (4, 0)),
    ]


def test_stacked_experts_follow_one_another():
    """The trainer's form: of each expert the rank's gate rows, then its up rows; of the down projections its columns."""
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2, ep=1, etp=2))[1]
    expert, rows = "model.layers.0.mlp.experts.", pieces(manifest, "decoder.layers.0.mlp.experts.weight1")
    at_3 = [(p.tensor, p.start, p.shape, p.local_start) for p in rows[6:8]]
    assert at_3 == [
        (f"{expert}3.gate_proj.weight", (4, 0), (4, 16), (24, 0)),
        (f"{expert}3.up_proj.weight", (4, 0), (4, 16), (28, 0)),
    ]
    down = pieces(manifest, "decoder.layers.0.mlp.experts.weight2")[3]
    assert (down.tensor, down.start, down.local_start) == (f"{expert}3.down_proj.weight", (0, 4), (48, 0))


def test_padded_vocabulary_is_covered_up_to_its_size():
    manifests = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2), pad_vocab_to=32)
    embeddings = [m.tensors[0] for m in manifests]
    assert [t.shape for t in embeddings] == [(64, 16), (64, 16)]
    assert [t.pieces[0].shape for t in embeddings] == [(64, 16), (36, 16)]


def test_virtual_stages_and_remainders():
    assert chunk_layers(8, Layout(pp=2, vpp=2), 0) == (range(0, 2), range(4, 6))
    assert [chunk_layers(94, Layout(pp=8), p)[0] for p in (0, 5, 6, 7)] == [
        range(0, 12), range(60, 72), range(72, 83), range(83, 94),
    ]  # fmt: skip


def test_transformer_engine_names():
    manifest = trainer_manifests.trainer_rank_manifests(
        QWEN3_MOE, Layout(ep=2, dp=2), spec=TRANSFORMER_ENGINE
    )[1]
    names = {t.name for t in manifest.tensors}
    layer = "decoder.layers.0."
    assert {
        f"{layer}self_attention.linear_qkv.layer_norm_weight",
        f"{layer}mlp.experts.linear_fc1.weight3",
    } <= names
    assert f"{layer}pre_mlp_layernorm.weight" in names and f"{layer}input_layernorm.weight" not in names
    assert (
        pieces(manifest, f"{layer}mlp.experts.linear_fc2.weight0")[0].tensor
        == "model.layers.0.mlp.experts.4.down_proj.weight"
    )


def test_router_has_its_own_dtype():
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(), router_dtype="float32")[0]
    dtypes = {t.name.rpartition(".layers.")[2][2:]: t.dtype for t in manifest.tensors}
    assert (
        dtypes["mlp.router.weight"] == "float32" and dtypes["self_attention.linear_proj.weight"] == "bfloat16"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, pp=2, vpp=2), Layout(tp=2, pp=2, ep=2, dp=2), Layout(ep=2, etp=2, dp=4)]
)
def test_every_checkpoint_element_is_held_and_shapes_agree(family, layout):
    import random

    hf = random_config(random.Random(3), family) | {"num_hidden_layers": 4}
    if not family_of(hf).expert_count_keys:
        layout = dataclasses.replace(layout, ep=1, etp=1)
    if family == "gpt_oss":  # its experts are dealt out whole
        layout = dataclasses.replace(layout, etp=1)
    manifests = trainer_manifests.trainer_rank_manifests(hf, layout, pad_vocab_to=8)
    held: dict[str, list] = {}
    for piece in (p for manifest in manifests for tensor in manifest.tensors for p in tensor.pieces):
        held.setdefault(piece.tensor, []).append(piece)
    for tensor in family_of(hf).checkpoint_tensors(hf):
        count = np.zeros(tensor.shape, np.int32)
        for piece in held.pop(tensor.name):
            count[box(piece.start, piece.shape)] += 1
        assert count.min() >= 1, tensor.name
    assert not held


def test_replicas_have_one_digest_and_others_not():
    layout = Layout(tp=2, ep=2, dp=2)
    manifests = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, layout)
    places = layout.places()
    for a in places:
        for b in places:
            same = (a.tp, a.pp, a.ep) == (b.tp, b.pp, b.ep)
            assert (manifests[a.rank].digest == manifests[b.rank].digest) == same


def test_layouts_that_do_not_divide_are_refused_with_the_parameter():
    with pytest.raises(
        ConfigError, match=r"rows of decoder\.layers\.0\.self_attention\.linear_qkv\.weight: 48"
    ):
        trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=5))
    with pytest.raises(ConfigError, match="qwen3 has no experts"):
        trainer_manifests.trainer_rank_manifests(QWEN3_MOE | {"model_type": "qwen3"}, Layout(ep=2, dp=2))
    with pytest.raises(ConfigError, match="'gemma3_text'"):
        trainer_manifests.trainer_rank_manifests({"model_type": "gemma3_text"}, Layout())


def test_a_live_model_of_another_shape_is_refused_by_name():
    layout = Layout()
    (table,) = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, layout)
    live = {f"module.{t.name}": np.empty(t.shape, np.float32) for t in table.tensors}
    good = from_model([live], QWEN3_MOE, layout, layout.place(0))
    assert {t.dtype for t in good.tensors} == {"float32"}
    live["module.decoder.final_layernorm.weight"] = np.empty((17,), np.float32)
    with pytest.raises(
        WeightSyncError, match=r"final_layernorm\.weight has shape \(17,\), the table says \(16,\)"
    ):
        from_model([live], QWEN3_MOE, layout, layout.place(0))
