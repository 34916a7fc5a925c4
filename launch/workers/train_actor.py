"""The thin Ray actor around one Megatron rank: its environment, its log file, and what needs the run's
configuration."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.errors import WeightSyncError
from mrl.launch.workers import route_blocks
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.routes import Routes
from mrl.samples import Role, TrainBatch
from mrl.training.pass_options import PassOptions
from mrl.training.process_environment import without_wandb

if TYPE_CHECKING:
    import numpy as np

    from mrl.resharding.planner.topology import Topology
    from mrl.resharding.transfer.session import Session
    from mrl.training.worker import MegatronWorker


class TrainActor:
    """One trainer rank; `start` builds its worker once the rendezvous is known."""

    worker: MegatronWorker

    def __init__(self, config: Config, rank: int, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import redirect

        gc.disable()  # until it has started: a fifth of the time of imports, which keep what they make
        redirect(log_folder, f"train-{rank}")
        listen_on_own_node()
        without_wandb()
        self._config, self._rank = config.in_updates(), rank
        self._weight_sync: Any = None
        self._objectives: dict[str, Any] = {}
        self._store: str | None = None
        self._store_folder: str | None = None

    def rendezvous(self, *, one_node: bool) -> str:
        """Where the run's processes meet (`wire.meeting.Meeting`); asked of rank 0 before `start`. On one
        node a file in a folder of this user's, which no other user and no other machine reaches; else a free
        port of this one's address."""
        import ray

        from mrl.resharding.wire.meeting import TCP

        if one_node:
            self._store_folder = tempfile.mkdtemp(prefix="mrl-store-", dir=os.environ.get("MRL_SESSION"))
            return f"{self._store_folder}/store"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{TCP}{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, store: str) -> None:
        """Builds the Megatron model and optimizer; a collective over all ranks."""
        from mrl.algorithms.objective import Objective, ValueObjective
        from mrl.training.profiler import Profiler
        from mrl.training.worker import MegatronWorker

        self._store = store
        self.worker = MegatronWorker(
            model=self._config.model,
            training=self._config.training,
            rank=self._rank,
            world_size=self._config.training.layout.world_size,
            store=store,
            seed=self._config.run.seed,
            replays=self._config.routing.replay != "off",
        )
        self._profiler = Profiler(
            Path(self._config.run_folder) / "profile",
            rank=self._rank,
            device=self.worker.device,
            memory=self._config.launch.profile.memory,
        )
        self._objectives["policy"] = Objective(self._config.algorithm)
        if self._config.critic is not None:
            self.worker.add_critic(self._config.critic)
            self._objectives["critic"] = ValueObjective(self._config.algorithm)
        gc.collect()
        gc.freeze()  # as the driver does
        gc.enable()

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray] | None:
        """MegatronWorker.forward() of a batch that brings handles of its routes, as far as the driver reads it."""
        arrays = self.worker.forward(self._with_routes(batch, options.role), options)
        return None if arrays is None else _sent(arrays)

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], list[Routes]] | None:
        """Return forward() of the policy, and the routes of the batch's samples; the block stays here."""
        arrays = self.worker.forward(batch, dataclasses.replace(options, record_routes=True))
        if arrays is None:
            return None
        block = route_blocks.share_block(arrays.pop("routes"))
        return _sent(arrays), route_blocks.of_samples(block, batch.lengths().tolist())

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> dict[str, float]:
        """Take one optimizer step of a role with its configured objective."""
        return self.worker.update(
            self._with_routes(batch, options.role),
            self._objectives[options.role],
            denominators,
            options,
            distillation=self._config.algorithm.distillation,
        )

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """Run the first half of the policy's update; also return the log-probs it was computed from."""
        metrics, arrays = self.worker.accumulate(
            self._with_routes(batch, "policy"),
            self._objectives["policy"],
            denominators,
            options,
            distillation=self._config.algorithm.distillation,
        )
        return metrics, None if arrays is None else _sent(arrays)

    def _with_routes(self, batch: TrainBatch, role: Role) -> TrainBatch:
        """The batch with its routes, where the role takes any."""
        if role == "critic":
            return dataclasses.replace(batch, routes=None)
        return route_blocks.read_routes(batch, deadline_seconds=self._config.training.collective_seconds)

    def connect(self, engines: Sequence[EngineRank], topology: Topology) -> str:
        """Prepares this rank's side of weight syncs to the engine ranks it feeds; returns the digest that
        sessions carry.

        `topology`: where all ranks of both sides are. WeightSyncError where the slot's engine rank is on another
        GPU.
        """
        from mrl.resharding.transfer.planned_sync import PlannedSync
        from mrl.resharding.wire.cuda_memory import device_uuid

        sync, addresses = self._config.sync, [engine.address for engine in engines]
        own = device_uuid(self.worker.device)
        shared = topology.trainer_slots == topology.engine_slots
        if shared and (other := engines[self._rank].device) != own:
            raise WeightSyncError(
                f"trainer rank {self._rank} is on {own}, the engine rank that shares its slot on {other}; each slot is one "
                "GPU (launch/workers/placement.py): has something changed CUDA_VISIBLE_DEVICES of a worker?"
            )
        self._weight_sync = PlannedSync(
            self.worker.policy,
            sync,
            addresses,
            [engine.manifest for engine in engines],
            topology=topology,
            store=self._store,
        )
        return self._weight_sync.digest

    def send(self, session: Session, absent: Sequence[int]) -> dict[str, float]:
        """This rank's side of one weight sync without these engine ranks."""
        return self._weight_sync.send(session, absent)

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks."""
        self._weight_sync.redial(addresses)

    def start_profile(self, step: int) -> None:
        """Records from here to stop_profile()."""
        self._profiler.start(step)

    def enter_phase(self, phase: str) -> None:
        """The driver begins a phase of the recorded step."""
        self._profiler.enter(phase)

    def leave_phase(self) -> None:
        """The phase that was entered last is over."""
        self._profiler.leave()

    def stop_profile(self) -> None:
        """Writes the record into the run's folder."""
        self._profiler.stop()

    def close(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        if hasattr(self, "worker"):
            self.worker.close()
        if self._store_folder is not None:
            shutil.rmtree(self._store_folder, ignore_errors=True)


def _sent(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the driver reads of a pass; entropies are told by the objective's metrics."""
    return {name: values for name, values in arrays.items() if name != "entropy"}
