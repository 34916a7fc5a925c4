"""All trainer ranks as one object: each method says how its arguments are dispatched.

| method | dispatch | result |
|---|---|---|
| forward | batch split by DP | [N] arrays merged back in batch order |
| update (of a role) | batch split by DP, denominators broadcast | metrics of rank 0 (already reduced over ranks) |
| accumulate, then step | the same, of the policy | the same, and between the two the [N] arrays of forward |
| broadcast | same arguments to every rank | list by rank |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.config.root import Config
from mrl.errors import WeightSyncError
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.train_actor import TrainActor
from mrl.loops.batch import merge, split
from mrl.models.layout import Layout
from mrl.observe.phases import PhaseClock
from mrl.samples import TrainBatch


class TrainGroup(ActorGroup):
    """The Megatron ranks of a run, one on each slot."""

    kind = "trainer rank"

    def __init__(self, config: Config, placement: Placement, clock: PhaseClock, **options: Any) -> None:
        """`options`: GPUs, environment and log folder of the actors."""
        layout = config.training.layout
        self.layout = Layout(**layout.model_dump())
        strategies = placement.strategies(range(layout.world_size))
        super().__init__(TrainActor, config, clock, strategies=strategies, slot_share=0.5, **options)

    def start_calls(self) -> dict[str, Any]:
        """Starts all ranks' construction; the calls are awaited by the caller beside the engines'."""
        import ray

        deadline = self._config.launch.start_deadline_seconds
        address, port, _ = ray.get(self.actors[0].rendezvous.remote(), timeout=deadline)
        return self.calls("start", address, port)

    def forward(self, batch: TrainBatch, *, role: str, **options: Any) -> dict[str, np.ndarray]:
        """Per-token arrays [N] of one role: logprobs, entropy, and what the options ask for."""
        parts, results = self._on_shards(
            batch, lambda actor, shard: actor.call.remote("forward", shard, role=role, **options)
        )
        return self._merged(batch, parts, results)

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], *, role: str = "policy"
    ) -> dict[str, float]:
        """One optimizer step of a role over the batch; its metrics are sums over ranks divided by their denominators."""
        _, results = self._on_shards(
            batch, lambda actor, shard: actor.update.remote(shard, dict(denominators), role)
        )
        return _first(results)

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The policy's update without its optimizer step: what forward() gives, with 0 for tokens that are not trained
        on, and the metrics so far. No parameter changes before step()."""
        parts, results = self._on_shards(
            batch, lambda actor, shard: actor.accumulate.remote(shard, dict(denominators))
        )
        metrics, arrays = ({rank: both[i] for rank, both in results.items()} for i in (0, 1))
        return self._merged(batch, parts, arrays), _first(metrics)

    def step(self) -> dict[str, float]:
        """The optimizer step along the gradients of accumulate(); its metrics."""
        return _first(self.wait(self.calls("call", "step")))

    def connect(self, addresses: Sequence[str], engines: Sequence[Any]) -> str:
        """Connects each rank to the engine ranks it feeds; the digest all ranks agree on."""
        slots = self._config.launch.slots_per_node or self.layout.world_size
        calls = {
            self.name(r): a.connect.remote(list(addresses), list(engines), slots)
            for r, a in enumerate(self.actors)
        }
        digests = self.wait(calls)
        if len(set(digests.values())) != 1:
            raise WeightSyncError(f"trainer ranks made different weight sync plans: {digests}")
        return next(iter(digests.values()))

    def send_calls(self, session: Any) -> dict[str, Any]:
        """Starts every rank's side of a weight sync, to be awaited together with the engines'."""
        return self.calls("send", session)

    def _on_shards(
        self, batch: TrainBatch, call: Callable[[Any, Any], Any]
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """(sample positions of each DP shard, every rank's result); `call` starts it for an actor and its shard."""
        import ray

        parts = split(batch, self.layout.dp)
        shards = [ray.put(batch.select(part)) for part in parts]
        places = [self.layout.place(rank) for rank in range(self.layout.world_size)]
        calls = {self.name(p.rank): call(self.actors[p.rank], shards[p.dp]) for p in places}
        return parts, self.wait(calls)

    def _merged(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], results: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        by_dp = [self._speaker(results, dp) for dp in range(self.layout.dp)]
        return {name: merge(batch, parts, [values[name] for values in by_dp]) for name in by_dp[0]}

    def _speaker(self, results: Mapping[str, Any], dp: int) -> dict[str, np.ndarray]:
        """The result of the rank that holds a DP shard's per-token values: tp 0, last pipeline stage."""
        for rank in range(self.layout.world_size):
            place = self.layout.place(rank)
            if (place.dp, place.tp, place.cp, place.pp) == (dp, 0, 0, self.layout.pp - 1):
                return results[self.name(rank)]
        raise AssertionError(f"no rank speaks for dp {dp}")


def _first(results: Mapping[str, dict[str, float]]) -> dict[str, float]:
    """Rank 0's metrics, which are those of all ranks."""
    return next(iter(results.values()))
