"""All engines as one: submit, poll, park. A prompt's samples go to one engine (mrl/rollout/routing.py).

An engine steps only inside a call. Two are under way on each engine that has work: while the driver looks at what the first
brought, the engine runs the second; a call carries the requests that came in the meantime.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Request, Response, ResponseBatch, Round, sample_of
from mrl.rollout.routing import Router

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


TICK_STEPS = 16
"""Steps of an engine in one call."""
CALLS_UNDER_WAY = 2


class RolloutGroup(ActorGroup[RolloutActor]):
    """The vLLM engines of a run; engine e has slots e * tp .. e * tp + tp - 1 of those that engines are on
    (`Config.engine_slots`)."""

    kind = "engine"
    actor_class: type[RolloutActor] = RolloutActor

    def __init__(
        self,
        config: Config,
        placement: Placement,
        clock: PhaseClock,
        *,
        sleeps: bool,
        by_index: bool = True,
        tick_steps: int = TICK_STEPS,
        **options: Any,
    ) -> None:
        """`sleeps`: the engines give their memory away between rounds. `by_index`: a prompt's engine follows from its
        index alone. `options`: environment and log folder of the actors."""
        tp = config.rollout.tp
        first_slots = config.engine_slots[::tp]
        # An engine takes no GPU of Ray's: its slots' trainer ranks have, or nobody, and the slots are the run's.
        visible = [placement.visible(range(first, first + tp)) for first in first_slots]
        super().__init__(
            self.actor_class,
            config,
            clock,
            strategies=placement.strategies(first_slots),
            slot_share=0.5,
            gpus=0.0,
            own_environments=visible,
            **options,
        )
        self._sleeps, self.tick_steps = sleeps, tick_steps
        self._router = Router(len(self.actors), by_index=by_index)
        self._outbox: list[list[Round | Request]] = [[] for _ in self.actors]
        self._goes_on = [False] * len(self.actors)
        """Whether the next call tells an engine to begin what waited since a park."""
        self._ticks: list[collections.deque[ObjectRef[ResponseBatch]]] = [
            collections.deque() for _ in self.actors
        ]

    def start(self) -> dict[str, ObjectRef[None]]:
        """Starts vLLM everywhere; the caller waits for it."""
        return self.start_on_all(RolloutActor.start)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, requested: Round | Iterable[Round | Request]) -> None:
        """Sends requests to their engines and returns at once; RolloutError, and none is sent, where one cannot be run. A
        deterministic engine takes only what one call of this hands in, until all of it is finished or parked."""
        requested = [requested] if isinstance(requested, Round) else list(requested)
        for each in requested:
            each.require_fits(self._config.model.max_length)
        for each in requested:
            if isinstance(each, Round):
                for engine, share in self._shares(each).items():
                    self._outbox[engine].append(share)
            else:
                engine = self._router.send(sample_of(each.request_id)[0], 1)
                self._outbox[engine].append(each)
        self._call()

    def poll(self, timeout_seconds: float) -> list[Response]:
        """Finished responses; waits for the first call of an engine to end at most `timeout_seconds`."""
        import ray

        self._call()
        heads = self.under_way()
        if not heads:
            return []
        with self._clock.waiting():
            ended, _ = ray.wait(heads, num_returns=1, timeout=timeout_seconds)
            ended += ray.wait(heads, num_returns=len(heads), timeout=0)[0]
        first = {e: ticks.popleft() for e, ticks in enumerate(self._ticks) if ticks and ticks[0] in ended}
        batches = self.wait({self.name(engine): call for engine, call in first.items()})
        responses = self._arrived(list(batches.values()))
        self._call()
        return responses

    def under_way(self) -> list[ObjectRef[ResponseBatch]]:
        """The next call of each engine that has work; when one ends, a poll has something to take."""
        return [ticks[0] for ticks in self._ticks if ticks]

    def where(self, prompt: int) -> str:
        """The engine that has a prompt's requests, by name."""
        engine = self._router.engine_of(prompt)
        return "no engine" if engine is None else self.name(engine)

    def park(self) -> list[Response]:
        """Takes all requests that were begun out of all engines: those that finished on the way, the others PARKED with
        their tokens so far, so that the engines can take weights or give their memory away. The others wait for `go_on`."""
        for engine, ticks in enumerate(self._ticks):
            ticks.append(self.start_on(engine, RolloutActor.park, self._outbox[engine], self.tick_steps))
            self._outbox[engine] = []
        calls = {
            f"{self.name(engine)}, call {number}": call
            for engine, ticks in enumerate(self._ticks)
            for number, call in enumerate(ticks, 1)
        }
        batches = self.wait(calls)
        for ticks in self._ticks:
            ticks.clear()
        responses = self._arrived(list(batches.values()))
        self._router.hold()
        return responses

    def go_on(self) -> None:
        """The engines go on with what waits since a park, beside what the next `submit` brings."""
        self._router.go_on()
        self._goes_on = [True] * len(self.actors)

    def _call(self) -> None:
        """Keeps two calls under way on every engine that has work; what waits to be sent goes with the next one."""
        for engine, ticks in enumerate(self._ticks):
            while self._router.load(engine) and len(ticks) < CALLS_UNDER_WAY:
                asked, self._outbox[engine] = self._outbox[engine], []
                goes_on, self._goes_on[engine] = self._goes_on[engine], False
                ticks.append(self.start_on(engine, RolloutActor.tick, asked, self.tick_steps, goes_on))

    def _arrived(self, batches: Sequence[ResponseBatch]) -> list[Response]:
        responses = [response for batch in batches for response in batch.responses()]
        for response in responses:
            self._router.ended(sample_of(response.request_id)[0])
        return responses

    def generate(self, requested: Round, deadline_seconds: float) -> list[ResponseBatch]:
        """All responses by one blocking call of each engine; for measurements."""
        calls = {
            self.name(engine): self.start_on(engine, RolloutActor.generate, share, deadline_seconds)
            for engine, share in self._shares(requested).items()
        }
        batches = list(self.wait(calls).values())
        self._arrived(batches)
        return batches

    def _shares(self, requested: Round) -> dict[int, Round]:
        """The prompts of each engine that has any; the router counts their requests."""
        shares: dict[int, list[Any]] = {}
        for prompt in requested.prompts:
            engine = self._router.send(prompt[0], requested.sampling.num_samples)
            shares.setdefault(engine, []).append(prompt)
        return {engine: Round(tuple(share), requested.sampling) for engine, share in shares.items()}

    # -- weight sync ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drops weights and KV cache on all engines that can."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.sleep())

    def wake(self, tag: str) -> None:
        """Takes the memory of one kind back: "weights" or "kv_cache"."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.wake([tag]))

    def engine_ranks(self) -> list[EngineRank]:
        """All engine ranks, in slot order; WeightSyncError where an engine lacks tensors of the trainer, or
        has others."""
        return [rank for engine in self.on_all(RolloutActor.engine_ranks) for rank in engine]

    def memory_use(self) -> dict[str, float]:
        """The tightest figures of all engine ranks (observe/memory_use.py); none while one generates, because the question
        would wait for the calls under way."""
        if any(map(self._router.load, range(len(self.actors)))):
            return {}
        return tightest(
            rank for engine in self.on_all(lambda actor: actor.engine.memory_use()) for rank in engine
        )

    def receive(self, session: Session) -> dict[str, ObjectRef[dict[str, Any]]]:
        """Starts every engine's side of a weight sync; the caller waits for it together with the
        trainer's."""
        return self.start_on_all(lambda actor: actor.engine.receive(session))
