"""All engines as one: submit, take, park. A prompt's samples go to one engine, or to one dp rank of an engine
(mrl/rollout/routing.py).

An engine steps only inside a call. Two rounds of calls are under way on each engine that has work: while the driver looks at
what the first brought, the engine runs the second; a call carries the requests that came in the meantime. A round is one call
of each dp rank, with the same number of steps, also of those without requests: they step together or not at all
(mrl/rollout/lockstep.py).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.models.families import family_of
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.resharding.planner.agreement import as_one_rank, require_agreement
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout.part import Part
from mrl.rollout.request import Request, Response, ResponseBatch, Round, sample_of
from mrl.rollout.routing import Router
from mrl.training.hf.folder import read_config

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


TICK_STEPS = 16
"""Steps of an engine in one call."""
CALLS_UNDER_WAY = 2
"""Rounds of calls."""


class RolloutGroup(ActorGroup[RolloutActor]):
    """The vLLM engines of a run; engine e has the e-th dp x tp slots of those that engines are on
    (`Config.engine_slots`), and a process for each dp rank (mrl/rollout/part.py). A rank here is a dp
    rank of some engine, numbered through all engines."""

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
        self._dp, tp = config.rollout.dp, config.rollout.tp
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
        num_ranks = len(self.actors)
        self._router = Router(num_ranks, by_index=by_index)
        self._outbox: list[list[Round | Request]] = [[] for _ in range(num_ranks)]
        self._goes_on = [False] * num_ranks
        """Whether the next call tells a rank to begin what waited since a park."""
        self._rounds: list[collections.deque[dict[int, ObjectRef[ResponseBatch]]]] = [
            collections.deque() for _ in range(num_ranks // self._dp)
        ]
        """The rounds under way on each engine, each a call of each of its ranks."""

    def name(self, number: int) -> str:
        return Part.of(number, dp=self._dp).name

    def start(self) -> dict[str, ObjectRef[None]]:
        """Starts vLLM everywhere; the caller waits for it."""
        if self._dp == 1:
            return self.start_on_all(RolloutActor.start, None)
        firsts = range(0, len(self.actors), self._dp)
        deadline = self._config.launch.start_deadline_seconds
        asked = {self.name(first): self.start_on(first, RolloutActor.meeting) for first in firsts}
        meetings = list(self.wait(asked, deadline_seconds=deadline).values())
        return {
            self.name(n): self.start_on(n, RolloutActor.start, meetings[n // self._dp])
            for n in range(len(self.actors))
        }

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, requested: Round | Iterable[Round | Request]) -> None:
        """Sends requests to their engines and returns at once; RolloutError, and none is sent, where one cannot be run. A
        deterministic engine takes only what one call of this hands in, until all of it is finished or parked."""
        requested = [requested] if isinstance(requested, Round) else list(requested)
        for each in requested:
            each.require_fits(self._config.model.max_length)
        for each in requested:
            if isinstance(each, Round):
                for rank, share in self._shares(each).items():
                    self._outbox[rank].append(share)
            else:
                rank = self._router.send(sample_of(each.request_id)[0], 1)
                self._outbox[rank].append(each)
        self._call()

    def at_work(self) -> list[int]:
        """The engines that have rounds under way."""
        self._call()
        return [engine for engine, rounds in enumerate(self._rounds) if rounds]

    def ended(self, timeout_seconds: float) -> list[int]:
        """The engines of whose next round a call ended, the others of which end with it; waits for the first at most
        `timeout_seconds`."""
        import ray

        self._call()
        heads = self.under_way()
        if not heads:
            return []
        with self._clock.waiting():
            ended, _ = ray.wait(heads, num_returns=1, timeout=timeout_seconds)
            ended += ray.wait(heads, num_returns=len(heads), timeout=0)[0]
        calls = {engine: self._rounds[engine][0].values() for engine in self.at_work()}
        return [engine for engine, round_ in calls.items() if not set(ended).isdisjoint(round_)]

    def take(self, engines: Sequence[int]) -> list[Response]:
        """The responses that finished in the next rounds of these engines; waits for their end."""
        over = [self._rounds[engine].popleft() for engine in engines]
        calls = {self.name(rank): call for round_ in over for rank, call in round_.items()}
        responses = self._arrived(list(self.wait(calls).values()))
        self._call()
        return responses

    def under_way(self) -> list[ObjectRef[ResponseBatch]]:
        """The calls of each engine's next round; when one ends, a poll has something to take."""
        return [call for rounds in self._rounds if rounds for call in rounds[0].values()]

    def where(self, prompt: int) -> str:
        """The engine, or its dp rank, that has a prompt's requests, by name."""
        rank = self._router.engine_of(prompt)
        return "no engine" if rank is None else self.name(rank)

    def park(self) -> list[Response]:
        """Takes all requests that were begun out of all engines: those that finished on the way, the others PARKED with
        their tokens so far, so that the engines can take weights or give their memory away. The others wait for `go_on`."""
        for engine, rounds in enumerate(self._rounds):
            rounds.append({rank: self._park(rank) for rank in self._ranks(engine)})
        calls = {
            f"{self.name(rank)}, call {number}": call
            for rounds in self._rounds
            for number, calls in enumerate(rounds, 1)
            for rank, call in calls.items()
        }
        batches = self.wait(calls)
        for rounds in self._rounds:
            rounds.clear()
        responses = self._arrived(list(batches.values()))
        self._router.hold()
        return responses

    def go_on(self) -> None:
        """The engines go on with what waits since a park, beside what the next `submit` brings."""
        self._router.go_on()
        self._goes_on = [True] * len(self._goes_on)

    def _call(self) -> None:
        """Keeps two rounds under way on every engine that has work; what waits to be sent goes with the next one."""
        for engine, rounds in enumerate(self._rounds):
            ranks = self._ranks(engine)
            while any(map(self._router.load, ranks)) and len(rounds) < CALLS_UNDER_WAY:
                rounds.append({rank: self._tick(rank) for rank in ranks})

    def _ranks(self, engine: int) -> range:
        return range(engine * self._dp, (engine + 1) * self._dp)

    def _tick(self, rank: int) -> ObjectRef[ResponseBatch]:
        asked, self._outbox[rank] = self._outbox[rank], []
        goes_on, self._goes_on[rank] = self._goes_on[rank], False
        return self.start_on(rank, RolloutActor.tick, asked, self.tick_steps, goes_on)

    def _park(self, rank: int) -> ObjectRef[ResponseBatch]:
        asked, self._outbox[rank] = self._outbox[rank], []
        return self.start_on(rank, RolloutActor.park, asked, self.tick_steps)

    def _arrived(self, batches: Sequence[ResponseBatch]) -> list[Response]:
        responses = [response for batch in batches for response in batch.responses()]
        for response in responses:
            self._router.ended(sample_of(response.request_id)[0])
        return responses

    def generate(self, requested: Round, deadline_seconds: float) -> list[ResponseBatch]:
        """All responses by one blocking call of each engine; for measurements."""
        shares = self._shares(requested)
        ranks = [r for r in range(len(self._outbox)) if any(s // self._dp == r // self._dp for s in shares)]
        nothing = Round((), requested.sampling)
        calls = {
            self.name(rank): self.start_on(
                rank, RolloutActor.generate, shares.get(rank, nothing), deadline_seconds
            )
            for rank in ranks
        }
        batches = list(self.wait(calls).values())
        self._arrived(batches)
        return batches

    def _shares(self, requested: Round) -> dict[int, Round]:
        """The prompts of each rank that has any; the router counts their requests."""
        shares: dict[int, list[Any]] = {}
        for prompt in requested.prompts:
            rank = self._router.send(prompt[0], requested.sampling.num_samples)
            shares.setdefault(rank, []).append(prompt)
        return {rank: Round(tuple(share), requested.sampling) for rank, share in shares.items()}

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
        told = self.on_all(RolloutActor.prepare_sync)
        manifests = self._manifests([[digest for _, _, digest in part] for part in told])
        ranks = [
            EngineRank(address, device, manifests[digest])
            for part in told
            for address, device, digest in part
        ]
        if self._dp > 1:
            self._require_whole_experts(ranks)
        return ranks

    def _manifests(self, digests: Sequence[Sequence[str]]) -> dict[str, RankManifest]:
        """By digest, from the first process that has it: engines are alike, and a manifest is megabytes."""
        first: dict[str, int] = {}
        for number, listed in enumerate(digests):
            for digest in listed:
                first.setdefault(digest, number)
        calls = {
            self.name(n): self.start_on(n, RolloutActor.manifests, [d for d, at in first.items() if at == n])
            for n in sorted(set(first.values()))
        }
        return {digest: m for part in self.wait(calls).values() for digest, m in part.items()}

    def _require_whole_experts(self, ranks: Sequence[EngineRank]) -> None:
        """The ranks of each engine together take the whole checkpoint; what one of them takes alone says nothing."""
        config, size = read_config(self._config.model.path), self._config.rollout.ranks
        checkpoint = as_one_rank(family_of(config).checkpoint_tensors(config))
        manifests = [rank.manifest for rank in ranks]
        engines = [manifests[first : first + size] for first in range(0, len(manifests), size)]
        for engine in {tuple(m.digest for m in engine): engine for engine in engines}.values():
            require_agreement([checkpoint], engine)

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
