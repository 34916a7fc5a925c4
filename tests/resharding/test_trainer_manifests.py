"""Trainer manifests from layouts: every checkpoint element is held, replicas are equal, worked boxes."""

import pytest

from mrl.errors import ConfigError
from mrl.models.layout import Layout, chunk_layers
from mrl.models.tensors import LOCAL
from mrl.resharding.planner import trainer_manifests
from tests.resharding.worlds import QWEN3_MOE


def pieces(manifest, name: str, chunk: int = 0):
    return next(t for t in manifest.tensors if t.name == name and t.chunk == chunk).pieces


def test_tp_above_the_groups_cuts_through_a_group():
    """Two groups of [16 q, 4 k, 4 v] rows over four ranks: 12 rows each, no row twice."""
    ranks = [
        pieces(m, "decoder.layers.0.self_attention.linear_qkv.weight")
        for m in trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=4))
    ]
    assert [[(p.tensor.split(".")[4], p.start[0], p.shape[0]) for p in rank] for rank in ranks[:2]] == [
        [("q_proj", 0, 12)],
        [("q_proj", 12, 4), ("k_proj", 0, 4), ("v_proj", 0, 4)],
    ]


def test_a_rank_holds_its_gate_rows_then_its_up_rows():
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2, ep=1, etp=2), spec=LOCAL)[1]
    slices = pieces(manifest, "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    names = [p.tensor.removeprefix("model.layers.0.mlp.experts.3.") for p in slices]
    assert names == ["gate_proj.weight", "up_proj.weight"]
    assert [(p.start, p.shape, p.local_start) for p in slices] == [
        ((4, 0), (4, 16), (0, 0)),
        ((4, 0), (4, 16), (4, 0)),
    ]


def test_stacked_experts_follow_one_another():
    """A rank has its gate rows, then its up rows, and columns of the down projection, per expert."""
    manifest = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, Layout(tp=2, ep=1, etp=2))[1]
    expert, rows = "model.layers.0.mlp.experts.", pieces(manifest, "decoder.layers.0.mlp.experts.weight1")
    at_3 = [(p.tensor, p.start, p.shape, p.local_start) for p in rows[6:8]]
    assert at_3 == [
        (f"{expert}3.gate_proj.weight", (4, 0), (4, 16), (24, 0)),
        (f"{expert}3.up_proj.weight", (4, 0), (4, 16), (28, 0)),
    ]
    down = pieces(manifest, "decoder.layers.0.mlp.experts.weight2")[3]
    assert (down.tensor, down.start, down.local_start) == (f"{expert}3.down_proj.weight", (0, 4), (48, 0))


def test_virtual_stages_and_remainders():
    assert chunk_layers(8, Layout(pp=2, vpp=2), 0) == (range(0, 2), range(4, 6))
    assert [chunk_layers(94, Layout(pp=8), p)[0] for p in (0, 5, 6, 7)] == [
        range(0, 12), range(60, 72), range(72, 83), range(83, 94),
    ]  # fmt: skip


def test_replicas_have_one_digest_and_others_not():
    layout = Layout(tp=2, ep=2, dp=2)
    manifests = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, layout)
    places = layout.all_coordinates()
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
