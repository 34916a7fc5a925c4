"""What an engine on CPU imports, ahead of its start."""

from __future__ import annotations

from mrl.config.root import Config
from mrl.rollout import environment, vllm_start
from mrl.rollout.part import Part


def variables(config: Config) -> dict[str, str | None]:
    """What the imports are made under; None: not in the environment."""
    return environment.variables(config.rollout, Part(), None, compiled=_is_compiled(config))


def _is_compiled(config: Config) -> bool:
    return not vllm_start.is_eager(config.rollout, on_cpu=True, routes=config.routing.replay == "engine")


def preload(config: Config) -> None:
    """The imports of an engine's process on CPU, whichever engine it will be; they start no thread."""
    environment.prepare(config.rollout, Part(), None, compiled=_is_compiled(config))
    import vllm.v1.engine.llm_engine  # noqa: F401

    import mrl.cpu.vllm_worker
    import mrl.data.tokenise
    import mrl.resharding.vllm.plugin
    import mrl.rollout.engine  # noqa: F401
