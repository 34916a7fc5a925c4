"""The thin Ray actor around one Megatron rank: environment, log file, and calls by name."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config


class TrainActor:
    """One rank. `start` builds the worker once the rendezvous is known; `call` runs one of its methods."""

    def __init__(self, config: Config, rank: int, log_folder: str) -> None:
        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"train-{rank}")
        # Megatron's code for inference imports wandb where it is installed, and uses nothing of it here; the import makes
        # temporary folders, which a rank that is killed would leave behind.
        sys.modules["wandb"] = None  # type: ignore[assignment]
        self._config, self._rank = config.in_updates(), rank
        self._worker: Any = None
        self._store: tuple[str, int] | None = None

    def rendezvous(self) -> tuple[str, int, int]:
        """This process's node address, a free port on it, and its pid; asked of rank 0 before `start`."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1], os.getpid()

    def start(self, address: str, port: int) -> None:
        """Builds the Megatron model and optimizer; a collective over all ranks."""
        from mrl.algorithms.objective import Objective, ValueObjective
        from mrl.training.worker import MegatronWorker

        self._store = address, port
        self._worker = MegatronWorker(
            model=self._config.model,
            training=self._config.training,
            rank=self._rank,
            world_size=self._config.training.layout.world_size,
            master_address=address,
            master_port=port,
            seed=self._config.run.seed,
        )
        self._objectives: dict[str, Any] = {"policy": Objective(self._config.algorithm)}
        if self._config.critic is not None:
            self._worker.add_critic(self._config.critic)
            self._objectives["critic"] = ValueObjective(self._config.algorithm)
        gc.collect()
        gc.freeze()  # as the driver does

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._worker, method)(*arguments, **options)

    def update(self, batch: Any, denominators: dict[str, float], role: str) -> Any:
        """One optimizer step of the policy or the critic with its configured objective."""
        temperature = self._config.rollout.temperature
        return self._worker.update(
            batch, self._objectives[role], denominators, role=role, temperature=temperature
        )

    def accumulate(self, batch: Any, denominators: dict[str, float]) -> Any:
        """The first half of the policy's update, with the log-probs and router margins it was computed from."""
        temperature = self._config.rollout.temperature
        return self._worker.accumulate(
            batch,
            self._objectives["policy"],
            denominators,
            temperature=temperature,
            with_router_margins=True,
        )

    def connect(self, addresses: Sequence[str], engines: Sequence[Any], slots_per_node: int) -> str:
        """Prepares this rank's weight sync to the engine ranks it feeds; returns the digest sessions must carry."""
        from mrl.resharding.transfer.weight_sync import GatherSync, PlannedSync

        sync = self._config.sync
        if sync.mode == "gather":
            self._weight_sync = GatherSync(self._worker, sync, addresses, store=self._store)
        else:
            self._weight_sync = PlannedSync(
                self._worker,
                sync,
                addresses,
                engines,
                slots_per_node=slots_per_node,
                store=self._store,
            )
        return self._weight_sync.digest

    def send(self, session: Any) -> dict[str, float]:
        """This rank's side of a weight sync."""
        return self._weight_sync.send(session)

    _weight_sync: Any = None

    def close(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        if self._worker is not None:
            self._worker.close()
