"""Ray actor of one Megatron rank: environment, log file, and calls that need the configuration."""

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
from mrl.processes.free_memory import release_free_memory
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

        gc.disable()  # until it has started: garbage collection takes a fifth of the import time
        redirect(log_folder, f"train-{rank}")
        listen_on_own_node()
        without_wandb()
        self._config, self._rank = config.in_updates(), rank
        self._weight_sync: Any = None
        self._objectives: dict[str, Any] = {}
        self._store: str | None = None
        self._store_folder: str | None = None

    def rendezvous(self, *, one_node: bool) -> str:
        """Return the ranks' rendezvous (`wire.meeting.Meeting`), called on rank 0 before `start`: on one node
        a file in a folder that only this user can reach, else a free port of this node."""
        import ray

        from mrl.resharding.wire.meeting import TCP

        if one_node:
            self._store_folder = tempfile.mkdtemp(prefix="mrl-store-", dir=os.environ.get("MRL_SESSION"))
            return f"{self._store_folder}/store"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{TCP}{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, store: str) -> None:
        """Build the Megatron model and optimizer; a collective over all ranks."""
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
        gc.freeze()  # as in the driver
        gc.enable()

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray] | None:
        """Run MegatronWorker.forward() on a batch with references to its routes, for the driver."""
        arrays = self.worker.forward(self._with_routes(batch, options.role), options)
        return None if arrays is None else _sent(arrays)

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], list[Routes]] | None:
        """Return forward() of the policy and the samples' routes; the route block stays on this node."""
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
        """Return the batch with its routes, if the role uses any."""
        if role == "critic":
            return dataclasses.replace(batch, routes=None)
        return route_blocks.read_routes(batch, deadline_seconds=self._config.training.collective_seconds)

    def connect(self, engines: Sequence[EngineRank], topology: Topology) -> str:
        """Prepare this rank's side of weight syncs to its engine ranks; return the plan's digest for
        sessions.

        `topology`: places of all ranks of both sides. Raises WeightSyncError if the slot's engine rank is on
        another GPU.
        """
        from mrl.resharding.transfer.planned_sync import PlannedSync
        from mrl.resharding.wire.cuda_memory import device_uuid

        sync, addresses = self._config.sync, [engine.address for engine in engines]
        device = device_uuid(self.worker.device)
        shared = topology.trainer_slots == topology.engine_slots
        if shared and (other := engines[self._rank].device) != device:
            raise WeightSyncError(
                f"trainer rank {self._rank} is on {device}, the engine rank of the same slot on {other}; a "
                "slot is one GPU (launch/workers/placement.py): check CUDA_VISIBLE_DEVICES of the workers"
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
        """Run this rank's side of one weight sync, without the `absent` engine ranks; then engines have the
        slot, and on CPU get the memory that updates used."""
        totals = self._weight_sync.send(session, absent)
        if self.worker.device.type == "cpu":
            release_free_memory()
        return totals

    def send_ahead(self, session: Session, absent: Sequence[int]) -> None:
        """Run this rank's side of one weight sync until the engine ranks have taken all bytes."""
        self._weight_sync.send_ahead(session, absent)

    def commit_sync(self) -> dict[str, float]:
        """End the weight sync of `send_ahead` once the engine ranks have loaded it."""
        return self._weight_sync.commit()

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Use new addresses for these engine ranks, whose processes were replaced."""
        self._weight_sync.redial(addresses)

    def start_profile(self, step: int) -> None:
        """Start recording, until stop_profile()."""
        self._profiler.start(step)

    def enter_phase(self, phase: str) -> None:
        """Mark the start of a phase of the recorded step."""
        self._profiler.enter(phase)

    def leave_phase(self) -> None:
        """Mark the end of the phase entered last."""
        self._profiler.leave()

    def stop_profile(self) -> None:
        """Write the record into the run folder."""
        self._profiler.stop()

    def close(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        if hasattr(self, "worker"):
            self.worker.close()
        if self._store_folder is not None:
            shutil.rmtree(self._store_folder, ignore_errors=True)


def _sent(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that the driver reads; entropies are in the objective's metrics."""
    return {name: values for name, values in arrays.items() if name != "entropy"}
