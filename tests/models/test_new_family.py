"""A new family is one class and one registration: refusals, names, a plan and log-probs follow from them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.models.families import FAMILIES, require_trainable
from mrl.models.family import Family
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.training.pass_options import PassOptions
from tests import tiny_models
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import check_forward
from tests.ranks import run_ranks
from tests.resharding.simulate import execute
from tests.resharding.worlds import World, checkpoint, loaded, random_config, same_bits


class Ministral(Family):
    """Ministral 8B: the defaults. A window over all positions is none."""

    model_type = "ministral"
    implemented = {"sliding_window": (None, 1024)}
    layer_kinds = ("full_attention", "sliding_attention")


@pytest.fixture
def ministral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, Ministral.model_type, Ministral())
    monkeypatch.setitem(tiny_models.FAMILIES, "ministral", ("Ministral", {"sliding_window": 1024}))


def test_without_registration_it_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'ministral' in config\.json is not supported"):
        require_trainable({"model_type": "ministral"})


def test_what_it_does_not_implement_is_named(ministral: None) -> None:
    hf = random_config(random.Random(0), "ministral") | {"rope_theta": 1e4}
    require_trainable(hf)
    with pytest.raises(ConfigError, match=r"sliding_window = 4096 .* does not implement for ministral"):
        require_trainable(hf | {"sliding_window": 4096})
    with pytest.raises(ConfigError, match="rope_type = 'llama3'"):
        require_trainable(hf | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_brings_every_byte_to_its_engines(seed: int, ministral: None) -> None:
    hf = random_config(random.Random(seed), "ministral") | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    hf |= {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
    train, rollout = Layout(tp=2, pp=2, vpp=2), Layout(tp=2, dp=2)
    held = trainer_manifests.trainer_rank_manifests(hf, train)
    needed = engine_manifests.engine_rank_manifests(hf, rollout)
    topology, options = Topology.shared(4, slots_per_node=4), PlanOptions(bucket_bytes=4096)
    full = checkpoint(World(hf, train, rollout, held, needed, topology, options))
    plan = build_plan(held, needed, topology, options)
    assert plan.summary()["whole_bytes"] == 0
    arrays = execute(plan, [loaded(manifest, full) for manifest in held])
    for manifest, by_name in zip(needed, arrays, strict=True):
        for tensor, expected in zip(manifest.tensors, loaded(manifest, full), strict=True):
            assert same_bits(by_name[tensor.name], expected), (manifest.rank, tensor.name)


def forward(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> dict[str, Any]:
    FAMILIES[Ministral.model_type] = Ministral()
    at = scenarios.worker(rank, world, port, folder, layout)
    samples, shard = scenarios.shard_of(tiny_models.random_batch(10, seed=1), at)
    return {"samples": samples, "arrays": at.forward(shard, PassOptions(temperature=scenarios.TEMPERATURE))}


@pytest.mark.integration
def test_megatron_loads_it_and_agrees_with_transformers(ministral: None, tmp_path: Path) -> None:
    folder = tiny_models.write_model(tmp_path / "ministral", "ministral")
    results = run_ranks(forward, 2, str(folder), {"tp": 2})
    check_forward(results, folder)
