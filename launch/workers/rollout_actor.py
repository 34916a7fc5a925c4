"""The thin Ray actor around one vLLM engine: environment, log file, and calls by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.models.families import family_of
from mrl.rollout.request import ResponseBatch, Round
from mrl.rollout.stop_tokens import end_of_text

WORKER_LOST_EXIT_CODE = 71


class RolloutActor:
    """One engine of rollout.tp ranks, stepped in this process."""

    def __init__(self, config: Config, engine_index: int, log_folder: str) -> None:
        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"engine-{engine_index}")
        self._config, self._index = config, engine_index
        self._engine: Any = None

    def start(self) -> None:
        """Starts vLLM with the model's shape and no weights; it serves after the first weight sync."""
        from transformers import AutoTokenizer

        from mrl.rollout.engine import RolloutEngine

        path = self._config.model.path
        self._engine = RolloutEngine(
            self._config.rollout,
            path,
            max_length=self._config.model.max_length,
            seed=self._config.run.seed,
            engine_index=self._index,
            sync=self._config.sync,
            stop_token_ids=end_of_text(AutoTokenizer.from_pretrained(path), path),
            deterministic=self._config.loop.deterministic,
            on_worker_lost=self._leave,
        )

    def _leave(self, worker: str) -> None:
        """An engine without one of its workers can do nothing more: its own end tells the driver at once."""
        from mrl.launch.workers.actor_log import leave

        leave(f"engine {self._index} lost its process {worker}", WORKER_LOST_EXIT_CODE)

    def submit(self, wanted: Round) -> None:
        self._engine.submit(wanted.requests())

    def poll(self, seconds: float) -> ResponseBatch:
        """What finishes while the engine is stepped for so long, or until nothing is left."""
        deadline, responses = time.monotonic() + seconds, []
        while (left := deadline - time.monotonic()) > 0 and self._engine.num_unfinished:
            responses += self._engine.poll(left)
        return ResponseBatch.of(responses + self._engine.poll(0.0))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._engine, method)(*arguments, **options)

    def generate(self, wanted: Round, deadline_seconds: float) -> ResponseBatch:
        """All responses of a round in one call."""
        deadline = time.monotonic() + deadline_seconds
        return ResponseBatch.of(self._engine.generate(wanted.requests(), deadline=deadline))

    def prepare_sync(self) -> list[str]:
        """The addresses of this engine's ranks, as the configured transport needs them."""
        import ray

        distributed = self._config.sync.transport == "distributed"
        return self._engine.prepare_sync(ray.util.get_node_ip_address() if distributed else None)

    def engine_manifests(self) -> list[Any]:
        """Where each checkpoint tensor lands on each of this engine's ranks, by vLLM's own loaders."""
        config = json.loads((Path(self._config.model.path) / "config.json").read_text(encoding="utf-8"))
        return self._engine.engine_manifests(family_of(config).checkpoint_tensors(config))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
