"""Estimate the memory that servers of reward.engines take on GPUs that are also slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from mrl.capacity.hardware import Hardware
from mrl.capacity.model_facts import find_facts
from mrl.config.sections.model import ModelSection
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.rewards.judges.judge_rules import EngineSection


def judge_bytes(engines: Mapping[str, EngineSection], hardware: Hardware) -> int:
    """Return the bytes on the fullest GPU: a rank's share of the weights, its cache, and a vLLM process;
    raise ConfigError if a folder has no weights and its model is unknown."""
    of_gpu: Counter[int] = Counter()
    for engine in engines.values():
        if engine.shares_slots:
            used = (
                _weights(engine) // engine.tp + (engine.kv_cache_bytes or 0) + hardware.engine_process_bytes
            )
            of_gpu.update(dict.fromkeys(engine.gpus, used))
    return max(of_gpu.values(), default=0)


def _weights(engine: EngineSection) -> int:
    """Return the size of the folder's files if it is served in their type, else by the model's shape."""
    files = list(Path(engine.model).glob("*.safetensors"))
    if files and engine.dtype == "auto":
        return sum(file.stat().st_size for file in files)
    dtype = "bfloat16" if engine.dtype == "auto" else engine.dtype
    return find_facts(ModelSection(path=engine.model)).parameters_total * DTYPE_BYTES[dtype]
