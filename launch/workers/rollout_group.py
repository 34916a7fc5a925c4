"""All engines as one door: submit, poll, abort. A prompt's samples go to one engine, chosen by prompt index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.launch.workers.waiting import wait_all
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, Round

POLL_SECONDS = 0.5
"""How long an engine steps inside one call before it answers with what is finished."""


class RolloutGroup(ActorGroup):
    """The vLLM engines of a run; engine e shares slots e * tp .. e * tp + tp - 1 with the trainer ranks."""

    kind = "engine"

    def __init__(
        self, config: Config, placement: Placement, clock: PhaseClock, *, sleeps: bool, **options: Any
    ) -> None:
        """`sleeps`: the engines give their memory away between rounds. `options`: environment and log folder of the actors."""
        first_slots = [engine * config.rollout.tp for engine in range(config.num_engines)]
        strategies = placement.strategies(first_slots)
        super().__init__(
            RolloutActor, config, clock, strategies=strategies, slot_share=0.5, gpus=0.0, **options
        )
        self._polls: dict[int, Any] = {}
        self._open = [0] * len(self.actors)
        self._sleeps = sleeps

    def start_calls(self) -> dict[str, Any]:
        return self.calls("start")

    def submit(self, wanted: Round) -> None:
        """Hands each engine its prompts; returns when all engines have them."""
        shares = self._shares(wanted)
        for engine, share in shares.items():
            self._open[engine] += share.num_requests
        self.wait({self.name(e): self.actors[e].submit.remote(share) for e, share in shares.items()})

    def generate_calls(self, wanted: Round, deadline_seconds: float) -> dict[str, Any]:
        """Starts one blocking generate call per engine; for measurements."""
        return {
            self.name(engine): self.actors[engine].generate.remote(share, deadline_seconds)
            for engine, share in self._shares(wanted).items()
        }

    def poll(self, timeout_seconds: float) -> list[Response]:
        """Finished responses; waits for the first ones at most `timeout_seconds`."""
        import ray

        for engine, count in enumerate(self._open):
            if count and engine not in self._polls:
                self._polls[engine] = self.actors[engine].poll.remote(POLL_SECONDS)
        if not self._polls:
            return []
        with self._clock.waiting():
            done, _ = ray.wait(list(self._polls.values()), num_returns=1, timeout=timeout_seconds)
        responses: list[Response] = []
        for engine in [e for e, ref in self._polls.items() if ref in done]:
            ref = self._polls.pop(engine)
            finished = wait_all(
                {self.name(engine): ref}, phase=self._clock.current, deadline_seconds=60.0, clock=self._clock
            )
            found = finished[self.name(engine)].responses()
            self._open[engine] -= len(found)
            responses += found
        return responses

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops requests wherever they run; they come back from poll as aborted."""
        self.broadcast("abort", list(request_ids))

    def sleep(self) -> None:
        """Drops weights and KV cache on all engines that can."""
        if self._sleeps:
            self.broadcast("sleep")

    def wake(self, tag: str) -> None:
        """Takes the memory of one kind back: "weights" or "kv_cache"."""
        if self._sleeps:
            self.broadcast("wake", [tag])

    def addresses(self) -> list[str]:
        """Where each engine rank's sender connects, in slot order."""
        return [address for engine in self.wait(self.calls("prepare_sync")).values() for address in engine]

    def engine_manifests(self) -> list[list[Any]]:
        """By engine, what each of its ranks wants of the checkpoint."""
        return list(self.wait(self.calls("engine_manifests")).values())

    def receive_calls(self, session: Any) -> dict[str, Any]:
        """Starts every engine's side of a weight sync."""
        return self.calls("call", "receive", session)

    def _shares(self, wanted: Round) -> dict[int, Round]:
        """By engine, where it has any."""
        shares: dict[int, list[tuple[int, Any]]] = {}
        for prompt in wanted.prompts:
            shares.setdefault(prompt[0] % len(self.actors), []).append(prompt)
        return {engine: Round(tuple(share), wanted.sampling) for engine, share in shares.items()}
