"""All trainer ranks as one object; each method dispatches its arguments to the ranks.

| method | dispatch | result |
|---|---|---|
| forward | batch sharded over DP | [N] arrays merged in batch order |
| forward_recording (policy) | the same | the same, and the batch with references to the recorded routes |
| update (a role) | batch sharded over DP, denominators for all | metrics of rank 0 (reduced over ranks) |
| accumulate, then step | the same, for the policy | the same, plus the [N] arrays of forward |
| all others | same arguments to every rank | the common result, or results by rank |
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mrl.capacity.model_facts import critic_facts, find_facts
from mrl.config.root import Config
from mrl.errors import WeightSyncError
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.launch.workers.train_actor import TrainActor
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.routes import Routes
from mrl.samples import TrainBatch
from mrl.training.balance import SampleBalancer, SampleCost
from mrl.training.batch import merge_parts
from mrl.training.pass_options import PassOptions
from mrl.training.prefixes import shares_prefixes
from mrl.training.process_environment import CPU_ENVIRONMENT

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session

R = TypeVar("R")


def gpu_environment() -> dict[str, str]:
    """Return the variables of a trainer rank on a GPU: one hardware queue, so that a collective starts before
    matrix products issued after it and overlaps with them (Megatron requires it for tensor or context
    parallelism before Blackwell)."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: os.environ.get(name, "1")}


class TrainGroup(ActorGroup[TrainActor]):
    """Megatron ranks of a run, one on each of the first slots."""

    kind = "trainer rank"
    actor_class: type[TrainActor] = TrainActor

    def __init__(self, config: Config, placement: Placement, clock: PhaseClock, **options: Any) -> None:
        """Start the actors; `options`: their environment and log folder."""
        layout = config.training.layout
        self.layout = layout.sizes()
        self._topology = placement.topology(config)
        self._one_node = len(set(placement.nodes)) == 1
        self.lost_nodes = placement.lost_nodes
        self.has_moved = True
        """True if weights may have changed since the last sync."""
        facts = find_facts(config.model)
        models = facts, critic_facts(config, facts)
        self.dealer = SampleBalancer(
            ranks=layout.dp,
            max_tokens=config.training.microbatch_tokens,
            cost=SampleCost.of_model(facts),
            cp=layout.cp,
            multiple=layout.pp if layout.vpp > 1 else 1,
            shares_prefixes=all(shares_prefixes(config.training, model.hf) for model in models),
        )
        super().__init__(
            self.actor_class,
            config,
            clock,
            strategies=placement.strategies(range(layout.world_size)),
            slot_share=0.5,
            gpus=float(placement.gpus),
            own_environments=[gpu_environment() if placement.gpus else CPU_ENVIRONMENT] * layout.world_size,
            **options,
        )

    def start(self) -> dict[str, ObjectRef[None]]:
        """Start building all ranks; the caller waits for it."""
        import ray

        deadline = self._config.launch.start_deadline_seconds
        rendezvous = self.start_on(0, TrainActor.rendezvous, one_node=self._one_node)
        return self.start_on_all(TrainActor.start, ray.get(rendezvous, timeout=deadline))

    # -- passes and updates ----------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray]:
        """Return per-token arrays [N]: log-probs and those that `options` adds, or a critic's values."""
        parts, results = self._on_shards(batch, lambda actor, shard: actor.forward(shard, options))
        return self._merged(batch, parts, results)

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], TrainBatch]:
        """Return forward() of the policy, and the batch with its samples' recorded routes."""
        parts, results = self._on_shards(batch, lambda actor, shard: actor.forward_recording(shard, options))
        shards = [result for result in results if result is not None]
        taken: dict[int, Routes] = {}
        for part, (_, routes) in zip(parts, shards, strict=True):
            taken |= zip(part.tolist(), routes, strict=True)
        arrays = self._merged(batch, parts, [arrays for arrays, _ in shards])
        return arrays, dataclasses.replace(batch, routes=tuple(taken[b] for b in range(batch.num_samples)))

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> dict[str, float]:
        """Run one optimizer step of a role; return its metrics, sums over ranks / their denominators."""
        divisors, self.has_moved = dict(denominators), True
        return self._on_shards(batch, lambda actor, shard: actor.update(shard, divisors, options))[1][0]

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Run the policy's update without the optimizer step, which only step() makes; return forward()'s
        arrays, 0 for tokens not trained on, and the metrics so far."""
        divisors = dict(denominators)
        parts, results = self._on_shards(
            batch, lambda actor, shard: actor.accumulate(shard, divisors, options)
        )
        metrics, arrays = zip(*results, strict=True)
        return self._merged(batch, parts, arrays), metrics[0]

    def step(self) -> dict[str, float]:
        """Run the optimizer step with the gradients of accumulate(); return its metrics."""
        self.has_moved = True
        return self.on_all(lambda actor: actor.worker.step())[0]

    def _on_shards(
        self, batch: TrainBatch, function: Callable[[TrainActor, TrainBatch], R]
    ) -> tuple[list[np.ndarray], list[R]]:
        """Run a function of each rank's shard; return (sample positions by DP shard, results by rank)."""
        import ray

        balanced, parts = self.dealer(batch)
        shards: list[Any] = [ray.put(balanced.select(part)) for part in parts]
        places = [self.layout.coordinates(rank) for rank in range(self.layout.world_size)]
        calls = {self.name(p.rank): self.start_on(p.rank, function, shards[p.dp]) for p in places}
        return parts, list(self.wait(calls).values())

    def _merged(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], results: Sequence[dict[str, np.ndarray] | None]
    ) -> dict[str, np.ndarray]:
        """Return all shards' arrays in batch order, each from tp 0, cp 0 of the last pipeline stage."""
        shards = [arrays for arrays in results if arrays is not None]
        return {name: merge_parts(batch, parts, [arrays[name] for arrays in shards]) for name in shards[0]}

    # -- weight sync -----------------------------------------------------------------------------------------

    def connect(self, engines: Sequence[EngineRank]) -> str:
        """Connect each rank to its engine ranks; return the plan's digest, the same on all ranks."""
        import ray

        shared_engines: Any = ray.put(list(engines))  # once for all ranks: it is large
        digests = self.on_all(TrainActor.connect, shared_engines, self._topology)
        if len(set(digests)) != 1:
            raise WeightSyncError(f"trainer ranks made different weight sync plans: {digests}")
        return digests[0]

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, ObjectRef[dict[str, float]]]:
        """Start every rank's side of a weight sync without the `absent` engine ranks; the caller waits."""
        return self.start_on_all(TrainActor.send, session, list(absent))

    def send_ahead(self, session: Session, absent: Sequence[int]) -> dict[str, ObjectRef[None]]:
        """Start to send a weight sync that `commit_sync` ends; the weights must not change meanwhile."""
        return self.start_on_all(TrainActor.send_ahead, session, list(absent))

    def commit_sync(self) -> dict[str, ObjectRef[dict[str, float]]]:
        """Start to end the weight sync of `send_ahead`, once the engines load it; the caller waits."""
        return self.start_on_all(TrainActor.commit_sync)

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Use new addresses for these engine ranks, whose processes were replaced."""
        self.on_all(TrainActor.redial, dict(addresses))

    def offload(self, *, keep_parameters: bool) -> None:
        """Free the trainer's memory on all slots, with `keep_parameters` all but the policy's parameters."""
        self.on_all(lambda actor: actor.worker.offload(keep_parameters=keep_parameters))

    def reload(self) -> None:
        """Restore what offload() freed."""
        self.on_all(lambda actor: actor.worker.reload())

    # -- files and facts -------------------------------------------------------------------------------------

    def keep_frozen(self) -> None:
        """Keep the teachers and the reference: model.reference_path, by default the current policy."""
        algorithm, path = self._config.algorithm, self._config.model.reference_path
        if algorithm.needs_reference:
            self.on_all(lambda actor: actor.worker.snapshot_reference(path))
        if algorithm.distillation is not None:
            for folder in algorithm.distillation.folders:
                self.on_all(lambda actor, folder=folder: actor.worker.add_teacher(folder))

    def save_checkpoint(self, path: Path, state: Mapping[str, Any], *, beside: bool) -> None:
        """Write all ranks' state and the loop's as one committed checkpoint; raise CheckpointError if that
        fails.

        With `beside` it returns once the state is copied; commit_checkpoint() completes the save.
        """
        folder, extra = str(path), dict(state)
        self.on_all(lambda actor: actor.worker.save_checkpoint(folder, extra, beside=beside))

    def checkpoint_is_written(self) -> bool:
        """Return True if commit_checkpoint() would not wait for files."""
        return all(self.on_all(lambda actor: actor.worker.checkpoint_is_written()))

    def commit_checkpoint(self) -> None:
        """Commit the checkpoint that is saved in the background; raise CheckpointError if the save failed."""
        self.on_all(lambda actor: actor.worker.commit_checkpoint())

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint, verified by all ranks in shares; return the loop's state in it."""
        folder = str(path)
        return self.on_all(lambda actor: actor.worker.load_checkpoint(folder))[0]

    def on_some(self, numbers: Iterable[int], function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on some ranks and wait for them."""
        self.wait({self.name(n): self.start_on(n, function, *arguments) for n in numbers})

    def memory_use(self) -> dict[str, float]:
        """Return the tightest values over all ranks (observe/memory_use.py)."""
        return tightest(self.on_all(lambda actor: actor.worker.memory_use()))

    def device_names(self) -> list[str]:
        """Return CUDA's name of each rank's device."""
        return self.on_all(lambda actor: actor.worker.device_name())
