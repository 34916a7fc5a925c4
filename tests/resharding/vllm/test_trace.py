"""Engine manifests from a layout against those a real vLLM engine gives, for every family."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, quantised, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from tests.resharding.simulate import execute
from tests.resharding.vllm.manifest_extension import from_plain
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
    "gpt_oss": transformers.GptOssConfig(
        num_hidden_layers=2, num_key_value_heads=2, head_dim=32, num_local_experts=8, num_experts_per_tok=2, **COMMON
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, attention_bias=True, use_qk_norm=True, **COMMON
    ),
}  # fmt: skip
EXTRA = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}

WIDE = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 256,
    "q_lora_rank": 128,
}
"""Widths that two ranks cut at whole blocks of 128."""

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from mrl.resharding.vllm.cpu_fp8 import allow_without_amx

allow_without_amx()

if __name__ == "__main__":
    model, tp, checkpoint, out, whole_experts = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:] == ["ep"]
    llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=tp, enforce_eager=True,
              max_model_len=128, max_num_seqs=4, dtype="bfloat16", enable_expert_parallel=whole_experts,
              worker_extension_cls="tests.resharding.vllm.manifest_extension.ManifestExtension")
    tensors = json.load(open(checkpoint))
    greedy = SamplingParams(temperature=0.0, max_tokens=8)

    def tokens():  # vLLM's CPU kernel has no map from global to own experts: with whole experts there is nothing to compare
        return not whole_experts and llm.generate({"prompt_token_ids": [1, 2, 3]}, greedy, use_tqdm=False)[0].outputs[0].token_ids

    before = tokens()
    manifests = llm.collective_rpc("engine_manifest", args=(tensors,))
    after = tokens()
    assert before == after, (before, after)
    json.dump(manifests, open(out, "w"))
"""


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        ("qwen3_moe", 2),
        ("deepseek_v3", 2),
        *(
            pytest.param(family, 2, marks=pytest.mark.slow)
            for family in ("qwen3", "mixtral", "glm4_moe", "minimax_m2")
        ),
        pytest.param("gpt_oss", 1, marks=pytest.mark.slow),
    ],
)
def test_layout_and_live_engine_agree(family, tp, tmp_path):
    manifests, hf = traced(family, tp, tmp_path)
    expected = engine_manifests.from_layout(hf, Layout(tp=tp))
    for ours, theirs in zip(expected, manifests, strict=True):
        assert by_name(ours) == by_name(theirs) and theirs.unplanned == ()
    check_chain(hf, Layout(tp=2) if family == "qwen3" else Layout(tp=2, ep=2), manifests)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "gpt_oss"])
def test_layout_and_live_engine_agree_where_weights_are_quantised(family, tmp_path):
    """Values and scales, cut by tensor parallelism; the trainer cuts other ways, at whole blocks too."""
    mla = family == "deepseek_v3"
    fields = {
        k: v for k, v in WIDE.items() if hasattr(CONFIGS[family], k) and not (mla and k.startswith("num"))
    }
    settings = quantised.engine_settings(CONFIGS[family].num_hidden_layers)
    manifests, hf = traced(family, 2, tmp_path, **fields, quantization_config=settings)
    expected = [quantised.manifest(m) for m in engine_manifests.from_layout(hf, Layout(tp=2))]
    for ours, theirs in zip(expected, manifests, strict=True):
        assert by_name(ours) == by_name(theirs) and theirs.unplanned == ()
        assert any(t.dtype == quantised.VALUES for t in theirs.tensors)
    # Megatron's local spec cuts kv_a_proj_with_mqa's 576 rows over tp, inside a block.
    check_chain(hf, Layout(dp=2) if mla else Layout(tp=2, dp=2, ep=1 if family == "qwen3" else 2), manifests)


def check_chain(hf: dict, train: Layout, manifests: list[RankManifest]) -> None:
    """Trainer layout, plan, bytes, what the real engine's loaders want: byte for byte what they load of whole tensors."""
    held = trainer_manifests.from_layout(hf, train)
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
        quantised="quantization_config" in hf,
    )
    plan, full = build_plan(held, numbered, topology, world.options), checkpoint(world)
    assert plan.summary()["fallback_bytes"] == 0
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
    manifests, hf = traced(family, 2, tmp_path, "ep")
    expected = engine_manifests.from_layout(hf, Layout(tp=2, ep=2))
    assert [by_name(manifest) for manifest in manifests] == [by_name(manifest) for manifest in expected]
    if family != "gpt_oss":
        assert by_name(expected[0]) != by_name(engine_manifests.from_layout(hf, Layout(tp=2))[0])


def traced(family: str, tp: int, folder: Path, *words: str, **fields: Any) -> tuple[list[RankManifest], dict]:
    """The manifests of a real engine's workers, and the config it was started with."""
    model = folder / family
    architecture = {"architectures": [type(CONFIGS[family]).__name__.removesuffix("Config") + "ForCausalLM"]}
    hf = CONFIGS[family].to_dict() | architecture | EXTRA.get(family, {}) | fields
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf))
    names = [(t.name, t.shape, t.dtype, t.stack) for t in family_of(hf).checkpoint_tensors(hf)]
    (folder / "checkpoint.json").write_text(json.dumps(names))
    (folder / "engine.py").write_text(ENGINE)
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "engine.py", str(model), str(tp), "checkpoint.json", "manifests.json", *words]
    with (
        tempfile.TemporaryDirectory() as temporary
    ):  # vLLM leaves its rendezvous file; a short name for its sockets
        environment["TMPDIR"] = temporary
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [from_plain(data) for data in json.loads((folder / "manifests.json").read_text())], hf


def by_name(manifest: RankManifest) -> dict:
    """Parameters by name, their boxes in order of place: the order of parameters is the engine's business."""
    return {
        t.name: dataclasses.replace(t, pieces=tuple(sorted(t.pieces, key=lambda p: p.local_start)))
        for t in manifest.tensors
    }
