"""Engine manifests from a layout equal those of a real vLLM engine, for every family."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.training.hf.hf_folder import read_config
from tests.engines import host_of
from tests.mrl.rollout import driving
from tests.resharding.vllm import sessions
from tests.tiny_models import FAMILIES, write_model

pytestmark = pytest.mark.integration

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "phi3": {"num_key_value_heads": 1},
    "seed_oss": {"num_key_value_heads": 1},
}
"""Fewer key heads than ranks, and a layer without experts."""


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "deepseek_v3"),
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("qwen3", "mixtral", "glm4_moe", "minimax_m2", "phi3", "seed_oss")
        ),
    ],
)
def test_layout_and_live_engine_agree(family, tmp_path):
    """On two ranks; tests/mrl/training/test_family_matrix.py has one rank of each family."""
    manifests, hf = traced(family, tmp_path)
    expected = engine_manifests.engine_rank_manifests(hf, Layout(tp=2))
    for ours, theirs in zip(expected, manifests, strict=True):
        assert by_name(ours) == by_name(theirs) and theirs.unplanned == ()


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v3", "gpt_oss"))],
)
def test_layout_and_live_engine_agree_where_experts_are_dealt_out(family, tmp_path):
    manifests, hf = traced(family, tmp_path, expert_parallel=True)
    expected = engine_manifests.engine_rank_manifests(hf, Layout(tp=2, ep=2))
    assert [by_name(manifest) for manifest in manifests] == [by_name(manifest) for manifest in expected]
    if family != "gpt_oss":
        assert by_name(expected[0]) != by_name(engine_manifests.engine_rank_manifests(hf, Layout(tp=2))[0])


def traced(family: str, folder: Path, **rollout: Any) -> tuple[list[RankManifest], dict]:
    """Return the manifests of a real engine's workers and its config; serving is unaffected."""
    experts = {"moe_intermediate_size": 64} if "moe_intermediate_size" in FAMILIES[family][1] else {}
    changes = {"num_hidden_layers": 3} | experts | CHANGES.get(family, {})
    model = write_model(folder / family, family, served=True, **changes)
    hf = read_config(model)
    rows = [(t.name, t.shape, t.dtype, t.stack) for t in family_of(hf).checkpoint_tensors(hf)]
    host = host_of(model, tp=2, dtype="bfloat16", max_num_seqs=4, **rollout)
    with contextlib.closing(host):
        before = host.call(driving.rescored, [[1, 2, 3, 4]])
        manifests = host.call(sessions.manifests, rows)
        (after,) = host.call(driving.rescored, [[1, 2, 3, 4]])
    assert after.tolist() == before[0].tolist()
    return manifests, hf


def by_name(manifest: RankManifest) -> dict:
    """Return parameters by name with ordered boxes, without order and bias types, which are vLLM's choice."""
    return {
        t.name: dataclasses.replace(
            t,
            dtype="" if t.name.endswith(".bias") else t.dtype,
            pieces=tuple(sorted(t.pieces, key=lambda p: p.local_start)),
        )
        for t in manifest.tensors
    }
