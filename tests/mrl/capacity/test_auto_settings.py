"""`auto` in settings becomes values for the hardware of the run or plan, and an explicit value wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.capacity.auto_settings import auto_values, kv_cache_bytes, resolve_auto
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.config.load import load
from mrl.config.root import Config
from mrl.files import CONFIGS
from tests.tiny_models import write_model

SMALLEST = ["run.name=a", "data.train=rows.jsonl", "reward.kind=maths"]
EXPLICIT = [
    "training.dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.enforce_eager=false",
    "rollout.kv_cache_bytes=1048576", "training.spec=local", "training.dispatcher=alltoall",
    "training.delta_net_kernels=torch",
]  # fmt: skip
SPREAD = ["training.layout={ep: 2, dp: 2}"]
LARGE = "model.path=weights/Qwen3-30B-A3B"
"""A model of configs/models: 48 layers, 4 key-value heads of 128."""


def auto(*words: str) -> Config:
    return load([], [*SMALLEST, *words])


def values(config: Config) -> tuple[Any, ...]:
    rollout = config.rollout
    return config.training.dtype, rollout.dtype, rollout.enforce_eager, rollout.kv_cache_bytes


def on_cpu(config: Config, *, gib: int = 16) -> Config:
    return resolve_auto(config, gpus=False, memory_bytes=gib << 30)


def test_four_keys_train_in_float32_and_eagerly_without_gpus(tmp_path: Path) -> None:
    config = auto(f"model.path={write_model(tmp_path / 'model')}")
    assert values(config) == ("auto",) * 4
    assert values(on_cpu(config)) == ("float32", "float32", True, 256 * 1280 * 1024)
    assert values(resolve_auto(config, gpus=True, memory_bytes=0)) == ("bfloat16", "bfloat16", False, "auto")


@pytest.mark.parametrize("gpus", [True, False])
def test_an_explicit_value_stays(gpus: bool) -> None:
    config = auto(LARGE, *EXPLICIT)
    resolved = resolve_auto(config, gpus=gpus, memory_bytes=16 << 30)
    assert resolved == config
    assert auto_values(config, resolved, gpus=gpus) == ""


def test_quantised_engines_stay_in_bfloat16_without_gpus() -> None:
    resolved = on_cpu(auto(LARGE, "rollout.quantization=fp8_block"))
    assert (resolved.training.dtype, resolved.rollout.dtype) == ("float32", "bfloat16")


def test_the_cache_fits_all_sequences_in_whole_blocks() -> None:
    config = on_cpu(auto(LARGE, "model.max_length=1281", "rollout.max_num_seqs=2"))
    token = 48 * 4 * 128 * 2 * 4  # layers, heads, width, keys and values, float32
    assert kv_cache_bytes(config, 1 << 50) == 2 * 1408 * token


def test_the_caches_of_a_node_take_an_eighth_of_its_memory_at_most() -> None:
    config, four = auto(LARGE), auto(LARGE, "training.layout={dp: 4}")
    assert on_cpu(config).rollout.kv_cache_bytes == 2 << 30
    assert on_cpu(four).rollout.kv_cache_bytes == 2 << 28
    two_a_node = four.model_copy(update={"launch": four.launch.model_copy(update={"slots_per_node": 2})})
    assert on_cpu(two_a_node).rollout.kv_cache_bytes == 2 << 29


def test_a_model_that_the_checks_refuse_leaves_the_cache_open(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("no JSON")
    resolved = on_cpu(auto(f"model.path={tmp_path}"))
    assert values(resolved) == ("float32", "float32", True, "auto")
    assert "KV cache" not in auto_values(auto(f"model.path={tmp_path}"), resolved, gpus=False)


def test_a_line_names_the_chosen_values() -> None:
    config, half = auto(LARGE), auto(LARGE, *EXPLICIT[1:3])
    line = (
        "CPU run: training in float32, engines in float32, eager engines, KV cache of 2 GiB per engine rank"
    )
    assert auto_values(config, on_cpu(config), gpus=False) == line
    line = "CPU run: training in float32, KV cache of 2 GiB per engine rank"
    assert auto_values(half, on_cpu(half), gpus=False) == line
    line = (
        "GPU run: training in bfloat16, transformer engine layers, experts by all-to-all, "
        "engines in bfloat16, compiled engines"
    )
    assert auto_values(config, resolve_auto(config, gpus=True, memory_bytes=0), gpus=True) == line


@pytest.mark.parametrize(
    ("model", "words", "packages", "kernels"),
    [
        ("Qwen3-30B-A3B", [], {"transformer_engine"}, ("transformer_engine", "alltoall", "torch")),
        ("Qwen3-30B-A3B", [], {"fla", "deep_ep"}, ("local", "alltoall", "torch")),
        ("Qwen3-30B-A3B", SPREAD, {"transformer_engine", "deep_ep"}, ("transformer_engine", "flex", "torch")),
        ("Qwen3-30B-A3B", [*SPREAD, "training.router_dtype=fp64"], {"transformer_engine", "deep_ep"},
         ("transformer_engine", "alltoall", "torch")),
        ("gpt-oss-120b", [], {"transformer_engine"}, ("local", "alltoall", "torch")),
        ("Qwen3-Next-80B-A3B-Instruct", [], {"transformer_engine", "fla"},
         ("transformer_engine", "alltoall", "fla")),
        ("Qwen3-Next-80B-A3B-Instruct", ["training.dtype=float32"], {"fla"}, ("local", "alltoall", "torch")),
    ],
)  # fmt: skip
def test_installed_kernels_become_settings_that_the_start_prints(model, words, packages, kernels) -> None:
    """The values are those that models/megatron/layer_choice.py would choose on such a GPU by itself."""
    config = auto(f"model.path=weights/{model}", *words)
    resolved = resolve_auto(config, gpus=True, memory_bytes=0, packages=packages)
    training = resolved.training
    assert (training.spec, training.dispatcher, training.delta_net_kernels) == kernels
    line = auto_values(config, resolved, gpus=True)
    assert f"{kernels[0].replace('_', ' ')} layers" in line
    assert ("delta nets by" in line) == ("Next" in model)


def test_a_plan_has_the_values_of_its_hardware() -> None:
    config = auto(LARGE)
    assert values(Estimate(config, load_hardware("8x141gb")).config) == (
        "bfloat16",
        "bfloat16",
        False,
        "auto",
    )
    planned = Estimate(config, load_hardware("laptop"))
    assert values(planned.config) == ("float32", "float32", True, 20_000_000_000 // 8)
    assert planned.engine.kv_cache == 20_000_000_000 // 8


def test_the_quickstart_has_the_values_that_it_had_by_hand() -> None:
    files = [CONFIGS / "quickstart.yaml", CONFIGS / "quickstart_model.yaml"]
    assert values(on_cpu(load(files), gib=2)) == ("float32", "float32", True, 67108864)
