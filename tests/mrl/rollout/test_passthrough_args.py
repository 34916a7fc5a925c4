"""rollout.engine_args: what is passed on, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.passthrough_args import OWNED, argument_faults, fields, require
from tests.engines import EngineHost


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("blok_size", 32, "vLLM's EngineArgs has no such field; did you mean 'block_size'?"),
        ("xyzzy", 1, "vLLM's EngineArgs has no such field"),
        ("block_size", "32", "vLLM expects int | None, got '32'"),
        ("block_size", True, "vLLM expects int | None, got True"),
        ("disable_custom_all_reduce", 1, "vLLM expects bool, got 1"),
        ("tensor_parallel_size", 2, "decided by rollout.tp"),
        ("gpu_memory_utilization", 0.5, "decided by rollout.gpu_memory_utilization"),
        ("data_parallel_size", 2, "decided by rollout.dp and the launcher"),
        ("nnodes", 2, "decided by the slots: if those of rollout.tp are on several nodes"),
        ("pipeline_parallel_size", 2, "an engine's ranks are rollout.dp x tp"),
        ("enable_eplb", True, "to the ranks that had them at the start"),
    ],
)
def test_what_cannot_be_passed_on_says_what_to_do(name: str, value: Any, fault: str) -> None:
    (message,) = argument_faults({name: value})
    assert message.startswith(f"rollout.engine_args.{name}: ")
    assert fault in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 32),
        ("block_size", None),
        ("kv_cache_dtype", "fp8"),
        ("cpu_offload_gb", 1),
        ("compilation_config", {"cudagraph_mode": "PIECEWISE"}),
        ("sleep_mode_offload_cudagraph", True),
        ("enable_nccl_comm_suspend", True),
        ("attention_backend", "FLASH_ATTN"),
    ],
)
def test_the_rest_is_vllms(name: str, value: Any) -> None:
    require({name: value})


def test_every_fault_is_told_and_every_owned_field_exists() -> None:
    with pytest.raises(ConfigError) as caught:
        require({"blok_size": 1, "dtype": "half"})
    assert len(str(caught.value).splitlines()) == 2
    assert OWNED.keys() <= fields().keys(), "vLLM renamed a field that is ours"
    program = (
        "import sys, mrl.rollout.passthrough_args as e; e.require({'block_size': 1}); "
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def block_size(engine: RolloutEngine) -> int:
    return engine._engine.vllm_config.cache_config.block_size


@pytest.mark.integration
def test_an_engine_gets_them(tiny_model: Path) -> None:
    rollout = RolloutSection(
        dtype="float32", enforce_eager=True, kv_cache_bytes=64 << 20, engine_args={"block_size": 32}
    )
    host = EngineHost(rollout=rollout, model_path=str(tiny_model), max_length=160, seed=0)
    try:
        assert host.call(block_size) == 32
    finally:
        host.close()


@pytest.mark.integration
def test_what_vllm_refuses_by_itself_is_wrong_input(tiny_model: Path) -> None:
    wanted = RolloutSection(dtype="float32", kv_cache_bytes=64 << 20, engine_args={"scheduling_policy": "x"})
    with pytest.raises(ConfigError, match=r"vLLM does not start an engine of .*: policy: Input should"):
        EngineHost(rollout=wanted, model_path=str(tiny_model), max_length=160, seed=0)
