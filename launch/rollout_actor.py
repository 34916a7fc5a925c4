"""The thin Ray actor around one vLLM engine: environment, log file, and calls by name."""

from __future__ import annotations

from typing import Any

from mrl.config.root import Config


class RolloutActor:
    """One engine of rollout.tp ranks, stepped in this process."""

    def __init__(self, config: Config, engine_index: int, log_folder: str) -> None:
        from launch.actor_log import redirect

        redirect(log_folder, f"engine-{engine_index}")
        self._config, self._index = config, engine_index
        self._engine: Any = None

    def start(self) -> None:
        """Starts vLLM with the model's shape and no weights; it serves after the first hand-over."""
        from mrl.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(
            rollout=self._config.rollout,
            sync=self._config.sync,
            model_path=self._config.model.path,
            max_length=self._config.model.max_length,
            seed=self._config.run.seed,
            engine_index=self._index,
        )

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._engine, method)(*arguments, **options)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
