"""An engine without the trainer's tensors in the trainer's shapes is refused by name; nothing is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout.engine import RolloutEngine
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration


def destinations(engine: RolloutEngine, checkpoint: list[CheckpointTensor]) -> list[RankManifest]:
    return engine.engine_manifests(checkpoint)


def trainers(model: Path, **changes: Any) -> list[CheckpointTensor]:
    """Return the checkpoint of a trainer whose config differs from the engine's by `changes`."""
    hf = json.loads((model / "config.json").read_text()) | changes
    return family_of(hf).checkpoint_tensors(hf)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 4}, r"k_proj.weight: the trainer has \(128, 64\), the engines \(64, 64\)"),
        ({"num_attention_heads": 8}, r"q_proj.weight: the trainer has \(256, 64\), the engines \(128, 64\)"),
        ({"moe_intermediate_size": 96}, r"experts.0.\w+_proj.weight \((96, 64|64, 96)\): it has .*experts"),
        (
            {"moe_intermediate_size": 32},
            r"w13_weight \(8, 128, 64\): no box .*gate_proj.weight gives it \(32, 64\)",
        ),
        ({"vocab_size": 100}, r"embed_tokens.weight \(100, 64\): it has .*embed_tokens.weight \(192, 64\)"),
        ({"vocab_size": 200}, r"embed_tokens.weight \(200, 64\): it has .*embed_tokens.weight \(192, 64\)"),
        ({"num_hidden_layers": 5}, r"model.layers.4.\S+ \(.*\): it has"),
        ({"num_hidden_layers": 3}, r"fills model.layers.3.self_attn.qkv_proj.weight \(256, 64\)"),
        ({"num_experts": 16}, r"mlp.gate.weight \(16, 64\): it has .*mlp.gate.weight \(8, 64\)"),
        ({"tie_word_embeddings": True}, r"fills lm_head.weight \(192, 64\)"),
    ],
)
def test_engine_and_trainer_of_different_shapes_are_refused_by_name(
    tiny_engine: EngineHost, tiny_model: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(WeightSyncError, match=named):
        tiny_engine.call(destinations, trainers(tiny_model, **changes))
    assert tiny_engine.call(destinations, trainers(tiny_model))


def test_an_engine_with_biases_that_no_trainer_has_is_refused_by_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "biased", "qwen3", **ENGINE_SHAPE, attention_bias=True)
    host = EngineHost(
        rollout=RolloutSection(dtype="float32", enforce_eager=True, kv_cache_bytes=64 << 20, max_num_seqs=8),
        model_path=str(model),
        max_length=64,
        seed=1,
    )
    with pytest.raises(WeightSyncError, match=r"fills model.layers.0.self_attn.qkv_proj.bias \(256,\)"):
        host.call(destinations, trainers(model, attention_bias=False))
    host.close()
