"""All train ranks as one object: each method says how its arguments are dispatched.

| method | dispatch | result |
|---|---|---|
| forward | batch split by DP | [N] arrays merged back in batch order |
| update (of a role) | batch split by DP, denominators broadcast | metrics of rank 0 (already reduced over ranks) |
| broadcast | same arguments to every rank | list by rank |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.placement import Placement
from launch.train_actor import TrainActor
from launch.waiting import wait_all
from mrl.config.root import Config
from mrl.errors import ReshardError
from mrl.loops.batch import merge, split
from mrl.observe.phases import PhaseClock
from mrl.samples import TrainBatch
from resharding.layout import Layout


class TrainGroup:
    """The Megatron ranks of a run, one on each slot."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        clock: PhaseClock,
        *,
        environment: Mapping[str, str],
        log_folder: str,
    ) -> None:
        import ray

        self._config, self._clock = config, clock
        layout = config.training.layout
        self.layout = Layout(**layout.model_dump())
        actor = ray.remote(max_restarts=0, max_task_retries=0)(TrainActor)
        gpus = 1.0 if _has_gpus() else 0.0
        self.actors = [
            actor.options(
                num_cpus=0,
                num_gpus=gpus,
                resources={"slot": 0.5},
                scheduling_strategy=placement.strategy(rank),
                runtime_env={"env_vars": dict(environment)},
            ).remote(config, rank, log_folder)
            for rank in range(self.layout.world_size)
        ]

    def start_calls(self) -> dict[str, Any]:
        """Starts all ranks' construction; the calls are awaited by the caller beside the engines'."""
        import ray

        deadline = self._config.launch.start_deadline_seconds
        address, port, _ = ray.get(self.actors[0].rendezvous.remote(), timeout=deadline)
        return self._calls("start", address, port)

    def forward(self, batch: TrainBatch, *, role: str, **options: Any) -> dict[str, np.ndarray]:
        """Per-token arrays [N] of one role: logprobs, entropy, and what the options ask for."""
        parts = split(batch, self.layout.dp)
        shards = self._put([batch.select(p) for p in parts])
        results = self._wait(
            {
                self._name(r): self.actors[r].call.remote(
                    "forward", shards[self._dp(r)], role=role, **options
                )
                for r in range(self.layout.world_size)
            }
        )
        by_dp = [self._speaker(results, dp) for dp in range(self.layout.dp)]
        return {name: merge(batch, parts, [values[name] for values in by_dp]) for name in by_dp[0]}

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], *, role: str = "policy"
    ) -> dict[str, float]:
        """One optimizer step over the batch; the metrics are already sums over ranks divided by their denominators."""
        parts = split(batch, self.layout.dp)
        shards = self._put([batch.select(p) for p in parts])
        results = self._wait(
            {
                self._name(r): self.actors[r].update.remote(shards[self._dp(r)], dict(denominators), role)
                for r in range(self.layout.world_size)
            }
        )
        metrics, room = next(iter(results.values())), "critic" if role == "critic" else "optim"
        return {name if "/" in name else f"{room}/{name}": value for name, value in metrics.items()}

    def broadcast(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """The same call on every rank; results by rank."""
        return list(self._wait(self._calls("call", method, *arguments, **options)).values())

    def connect(self, addresses: Sequence[str], destinations: Sequence[Any]) -> str:
        """Connects each rank to the engine ranks it feeds; the digest all ranks agree on."""
        slots = self._config.launch.slots_per_node or self.layout.world_size
        calls = {
            self._name(r): a.connect.remote(list(addresses), list(destinations), slots)
            for r, a in enumerate(self.actors)
        }
        digests = self._wait(calls)
        if len(set(digests.values())) != 1:
            raise ReshardError(f"train ranks made different hand-over plans: {digests}")
        return next(iter(digests.values()))

    def send_calls(self, session: Any) -> dict[str, Any]:
        """Starts every rank's side of a hand-over, to be awaited together with the engines'."""
        return self._calls("send", session)

    def close_calls(self) -> dict[str, Any]:
        return self._calls("close")

    def _calls(self, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {
            self._name(r): getattr(actor, method).remote(*arguments, **options)
            for r, actor in enumerate(self.actors)
        }

    def _wait(self, calls: Mapping[str, Any]) -> dict[str, Any]:
        return wait_all(
            calls,
            phase=self._clock.current,
            deadline_seconds=self._config.loop.phase_deadline_seconds,
            clock=self._clock,
        )

    def _put(self, shards: Sequence[TrainBatch]) -> list[Any]:
        import ray

        return [ray.put(shard) for shard in shards]

    def _dp(self, rank: int) -> int:
        return self.layout.place(rank).dp

    def _speaker(self, results: Mapping[str, Any], dp: int) -> dict[str, np.ndarray]:
        """The result of the rank that holds a DP shard's per-token values: tp 0, last pipeline stage."""
        for rank in range(self.layout.world_size):
            place = self.layout.place(rank)
            if (place.dp, place.tp, place.cp, place.pp) == (dp, 0, 0, self.layout.pp - 1):
                return results[self._name(rank)]
        raise AssertionError(f"no rank speaks for dp {dp}")

    @staticmethod
    def _name(rank: int) -> str:
        return f"train rank {rank}"


def _has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0
