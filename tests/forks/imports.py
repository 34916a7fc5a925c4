"""Imports of a CPU run's workers, by kind: eager one-thread engines, trainer ranks. None starts a thread."""

from __future__ import annotations

import os
from pathlib import Path

from mrl.capacity.auto_settings import resolve_auto
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.rollout import vllm_environment, vllm_start
from mrl.rollout.engine_process import EngineProcess
from mrl.training.process_environment import CPU_ENVIRONMENT, without_wandb

KINDS = ("engine", "trainer")


def quickstart() -> Config:
    """Return the quickstart's configuration as its workers get it: values in place of `auto`."""
    config = load_config(str(Path(__file__).parents[2] / "configs/quickstart.yaml"))
    return resolve_auto(config, gpus=False, memory_bytes=16 << 30)


def variables(config: Config) -> dict[str, str | None]:
    """Return the variables that an engine's imports depend on; None: not in the environment."""
    return vllm_environment.variables(config.rollout, EngineProcess(), None, compiled=_is_compiled(config))


def _is_compiled(config: Config) -> bool:
    return not vllm_start.is_eager(config.rollout, on_cpu=True, routes=config.routing.replay == "engine")


def preload(kind: str) -> None:
    if kind == "trainer":
        os.environ.update(CPU_ENVIRONMENT)
        without_wandb()
        import mrl.algorithms.objective
        import mrl.training.profiler
        import mrl.training.worker

        return
    config = quickstart()
    vllm_environment.prepare(
        config.rollout, EngineProcess(), None, compiled=_is_compiled(config), on_cpu=True
    )
    import vllm.v1.engine.llm_engine  # noqa: F401

    import mrl.cpu.vllm_worker
    import mrl.data.tokenise
    import mrl.resharding.vllm.plugin
    import mrl.rollout.engine
    import mrl.rollout.engine_loop
    import mrl.rollout.engine_server  # noqa: F401
