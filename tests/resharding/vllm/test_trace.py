"""Engine manifests from a layout against those a real vLLM engine gives, for every family."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mrl.config.sections.rollout import RolloutSection
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.resharding.simulate import execute
from tests.resharding.vllm import sessions
from tests.resharding.worlds import World, as_engines_want, checkpoint, loaded

pytestmark = pytest.mark.integration

COMMON = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MINIMAX = {
    "num_local_experts": 8, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True, "num_mtp_modules": 0,
}  # fmt: skip
CONFIGS = {
    "qwen3": transformers.Qwen3Config(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, **COMMON
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, mlp_only_layers=[1], tie_word_embeddings=False, **COMMON
    ),
    "mixtral": transformers.MixtralConfig(
        num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **COMMON
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        num_hidden_layers=3, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=96,
        qk_rope_head_dim=64, v_head_dim=64, qk_nope_head_dim=64, **COMMON
    ),
    "minimax_m2": transformers.MiniMaxM2Config(
        num_hidden_layers=2, num_key_value_heads=2, head_dim=32, num_experts_per_tok=2, **MINIMAX, **COMMON
    ),
    "phi3": transformers.Phi3Config(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=32, pad_token_id=None, **COMMON
    ),
    "gpt_oss": transformers.GptOssConfig(
        num_hidden_layers=2, num_key_value_heads=2, head_dim=32, num_local_experts=8, num_experts_per_tok=2, **COMMON
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, attention_bias=True, use_qk_norm=True, **COMMON
    ),
}  # fmt: skip
DENSE = ("qwen3", "phi3")
EXTRA = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        ("qwen3_moe", 2),
        ("deepseek_v3", 2),
        *(
            pytest.param(family, 2, marks=pytest.mark.slow)
            for family in ("qwen3", "mixtral", "glm4_moe", "minimax_m2", "phi3")
        ),
        pytest.param("gpt_oss", 1, marks=pytest.mark.slow),
    ],
)
def test_layout_and_live_engine_agree(family, tp, tmp_path):
    manifests, hf = traced(family, tp, tmp_path)
    expected = engine_manifests.engine_rank_manifests(hf, Layout(tp=tp))
    for ours, theirs in zip(expected, manifests, strict=True):
        assert by_name(ours) == by_name(theirs) and theirs.unplanned == ()
    check_chain(hf, Layout(tp=2) if family in DENSE else Layout(tp=2, ep=2), manifests)


def check_chain(
    hf: dict, train: Layout, manifests: list[RankManifest], *, is_quantised: bool = False
) -> None:
    """Trainer layout, plan, bytes, what the real engine's loaders want: byte for byte what they load of whole tensors."""
    held = trainer_manifests.trainer_rank_manifests(hf, train)
    numbered = [dataclasses.replace(manifest, rank=rank) for rank, manifest in enumerate(manifests)]
    topology = Topology.separate(len(held), len(numbered))
    world = World(
        hf,
        train,
        Layout(tp=len(numbered)),
        held,
        numbered,
        topology,
        PlanOptions(bucket_bytes=1 << 20),
        quantised=is_quantised,
    )
    plan, full = build_plan(held, numbered, topology, world.options), checkpoint(world)
    assert plan.summary()["whole_bytes"] == 0
    results = execute(plan, [loaded(manifest, full) for manifest in held])
    for manifest, result in zip(numbered, results, strict=True):
        for tensor, expected in zip(
            manifest.tensors, loaded(manifest, as_engines_want(world, full)), strict=True
        ):
            assert result[tensor.name].tobytes() == expected.tobytes(), (manifest.rank, tensor.name)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v3", "gpt_oss"))],
)
def test_layout_and_live_engine_agree_where_experts_are_dealt_out(family, tmp_path):
    """As rollout.expert_parallel starts it."""
    manifests, hf = traced(family, 2, tmp_path, {"expert_parallel": True})
    expected = engine_manifests.engine_rank_manifests(hf, Layout(tp=2, ep=2))
    assert [by_name(manifest) for manifest in manifests] == [by_name(manifest) for manifest in expected]
    if family != "gpt_oss":
        assert by_name(expected[0]) != by_name(engine_manifests.engine_rank_manifests(hf, Layout(tp=2))[0])


def traced(
    family: str, tp: int, folder: Path, rollout: dict[str, Any] | None = None, **fields: Any
) -> tuple[list[RankManifest], dict]:
    """The manifests of a real engine's workers, and the config it was started with; asking changes nothing that it serves."""
    model = folder / family
    architecture = {"architectures": [type(CONFIGS[family]).__name__.removesuffix("Config") + "ForCausalLM"]}
    hf = CONFIGS[family].to_dict() | architecture | EXTRA.get(family, {}) | fields
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf))
    rows = [(t.name, t.shape, t.dtype, t.stack) for t in family_of(hf).checkpoint_tensors(hf)]
    settings = {"enforce_eager": True, "kv_cache_bytes": 64 << 20, "max_num_seqs": 4} | (rollout or {})
    section = RolloutSection(tp=tp, dtype="bfloat16", **settings)
    host = EngineHost(rollout=section, model_path=str(model), max_length=128, seed=1)
    with contextlib.closing(host):
        before = host.call(driving.rescored, [[1, 2, 3, 4]])
        manifests = host.call(sessions.manifests, rows)
        (after,) = host.call(driving.rescored, [[1, 2, 3, 4]])
    assert after.tolist() == before[0].tolist()
    return manifests, hf


def by_name(manifest: RankManifest) -> dict:
    """Parameters by name, their boxes in order of place: the order of parameters is the engine's business, and so is the type of
    biases, which vLLM keeps in float32 on processors with AMX (dispatch_cpu_unquantized_gemm)."""
    return {
        t.name: dataclasses.replace(
            t,
            dtype="" if t.name.endswith(".bias") else t.dtype,
            pieces=tuple(sorted(t.pieces, key=lambda p: p.local_start)),
        )
        for t in manifest.tensors
    }
