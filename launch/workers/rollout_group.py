"""All engines as one: submit, take, park. A prompt's samples go to one engine, or to one dp rank of an engine
(mrl/rollout/request_book.py, routing.py).

An engine steps only inside a call. Two rounds of calls are under way on each engine that has work: while the driver looks at
what the first brought, the engine runs the second; a call carries the requests that came in the meantime, and lasts longer where
nobody waits for what it brings (mrl/rollout/stint.py). A round is one call
of each dp rank, with the same number of steps, also of those without requests: they step together or not at all
(mrl/rollout/lockstep.py).

An engine that dies, or does not answer, is dropped where the run survives that (fleet.py): its unfinished requests come back
PARKED without new tokens, and whoever asked hands them in again.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.errors import WeightSyncError, WorkerLost
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.actor_log import last_word
from mrl.launch.workers.engine_places import places
from mrl.launch.workers.fleet import Fleet, RankFacts, Start
from mrl.launch.workers.headless_actor import HeadlessActor, HeadlessGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.models.families import family_of
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.resharding.planner.agreement import as_one_rank, require_agreement
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout.part import schedulers
from mrl.rollout.request import GenerationRequest, Response, ResponseBatch, Round
from mrl.rollout.request_book import RequestBook
from mrl.rollout.stint import Stint, Stints
from mrl.training.hf.hf_folder import read_config

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


log = logging.getLogger(__name__)

TICK_STEPS, TICK_BEATS = 16, 4
"""Steps of an engine in a call that is not to last, and beats in which it makes them: between two an engine looks up from its work."""
CALLS_UNDER_WAY = 2
"""Rounds of calls."""


class RolloutGroup(ActorGroup[RolloutActor]):
    """The vLLM engines of a run; engine e has the e-th dp x tp slots of those that engines are on
    (`Config.engine_slots`), and a process for each dp rank (mrl/rollout/part.py). A rank here is a dp
    rank of some engine, numbered through all engines. Where its tp slots lie on several nodes its process is on the first of
    them, and `further` has those of the others."""

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
        **options: Any,
    ) -> None:
        """`sleeps`: the engines give their memory away between rounds. `by_index`: a prompt's engine follows from its
        index alone. `options`: environment and log folder of the actors."""
        self._dp = config.rollout.dp
        self._parts = schedulers(config, placement.nodes)
        super().__init__(self.actor_class, config, clock, **places(self._parts, config, placement), **options)
        further = [each for part in self._parts for each in part.further()]
        self.further = HeadlessGroup(config, clock, **places(further, config, placement), **options)
        self._sleeps, self.tick_steps = sleeps, TICK_STEPS
        num_ranks = len(self.actors)
        self._book = RequestBook(num_ranks, by_index=by_index)
        """Of ranks."""
        self._rounds: list[collections.deque[dict[int, ObjectRef[ResponseBatch]]]] = [
            collections.deque() for _ in range(num_ranks // self._dp)
        ]
        """The rounds under way on each engine, each a call of each of its ranks."""
        self._since = [0.0] * len(self._rounds)
        """When the driver began to wait for the first of them (monotonic)."""
        self._digests: list[list[str]] = []
        self.when_up: Callable[[], None] = lambda: None
        """Called when no engine serves and one waits to be brought in."""
        self._stints = Stints(TICK_BEATS)
        self._fleet = Fleet(
            len(self._rounds),
            clock,
            most=config.rollout.replace,
            deadline_seconds=config.launch.start_deadline_seconds,
            start=self._replace,
        )

    def numbers(self) -> Sequence[int]:
        return [rank for engine in self._fleet.serving for rank in self._ranks(engine)]

    def name(self, number: int) -> str:
        return self._parts[number].name

    def start(self) -> dict[str, ObjectRef[None]]:
        """Starts vLLM everywhere; the caller waits for it."""
        firsts = [n for n, part in enumerate(self._parts) if not (part.is_whole or part.dp_rank)]
        deadline = self._config.launch.start_deadline_seconds
        asked = {self.name(first): self.start_on(first, RolloutActor.meeting) for first in firsts}
        meetings = dict(zip(firsts, self.wait(asked, deadline_seconds=deadline).values(), strict=True))
        calls: dict[str, ObjectRef[None]] = {}
        for number, part in enumerate(self._parts):
            calls |= self._start(number, meetings.get(number - part.dp_rank))
        return calls

    def _start(self, number: int, meeting: Any) -> dict[str, ObjectRef[None]]:
        """Starts a rank, on all its nodes."""
        beside = self.further.beside(self._parts[number])
        handles = [self.further.actors[n] for n in beside]
        calls = {self.name(number): self.start_on(number, RolloutActor.start, meeting, *handles)}
        others = {
            self.further.name(n): self.further.start_on(n, HeadlessActor.start, meeting) for n in beside
        }
        return calls | others

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, requested: Round | Iterable[Round | GenerationRequest]) -> None:
        """Sends requests to their engines and returns at once; RolloutError, and none is sent, where one cannot be run. A
        deterministic engine takes only what one call of this hands in, until all of it is finished or parked."""
        requested = [requested] if isinstance(requested, Round) else list(requested)
        for each in requested:
            each.require_fits(self._config.model.max_length)
        self._book.hand_in(requested, serves=bool(self._fleet.serving))
        self._call()
        # What was handed in waits for the next call; where it would find seats, now is better.
        seats = self._config.rollout.max_num_seqs
        self._stints.ring([rank for rank in self._stints.ranks if self._book.waits_in_vain(rank, seats)])

    def at_work(self) -> list[int]:
        """The engines that have rounds under way."""
        self._call()
        return [engine for engine, rounds in enumerate(self._rounds) if rounds]

    def ended(self, timeout_seconds: float) -> list[int]:
        """The engines of whose next round a call ended, the others of which end with it; waits for the first at most
        `timeout_seconds`."""
        import ray

        if not self._fleet.serving:
            self._await_engine(timeout_seconds)
        self._call()
        heads = self.under_way()
        if not heads:
            return []
        with self._clock.waiting():
            if timeout_seconds:
                ray.wait(heads, num_returns=1, timeout=timeout_seconds)
            ended = set(ray.wait(heads, num_returns=len(heads), timeout=0)[0])
        at_work = [engine for engine, rounds in enumerate(self._rounds) if rounds]
        found = [engine for engine in at_work if not ended.isdisjoint(self._rounds[engine][0].values())]
        self._lose_late(set(at_work) - set(found))
        return found

    def take(self, engines: Sequence[int]) -> list[Response]:
        """The responses that finished in the next rounds of these engines; waits for their end. Those of an engine that was
        lost are PARKED."""
        over = {engine: self._rounds[engine].popleft() for engine in engines if self._rounds[engine]}
        for engine in over:
            self._since[engine] = time.monotonic()
        responses = [r for engine, round_ in over.items() for r in self._brought(engine, [round_])]
        self._call()
        return self._book.take_returned() + responses

    def under_way(self) -> list[ObjectRef[ResponseBatch]]:
        """The calls of each engine's next round; when one ends, a poll has something to take."""
        return [call for rounds in self._rounds if rounds for call in rounds[0].values()]

    def where(self, prompt: int) -> str:
        """The engine, or its dp rank, that has a prompt's requests, by name."""
        rank = self._book.engine_of(prompt)
        return "no engine" if rank is None else self.name(rank)

    def park(self) -> list[Response]:
        """Takes all requests that were begun out of all engines: those that finished on the way, the others PARKED with
        their tokens so far, so that the engines can take weights or give their memory away. The others wait for `go_on`."""
        self.be_patient(0.0)
        over: dict[int, list[dict[int, ObjectRef[ResponseBatch]]]] = {}
        for engine in self._fleet.serving:
            parks = {rank: self._park(rank) for rank in self._ranks(engine)}
            over[engine] = [*self._rounds[engine], parks]
            self._rounds[engine].clear()
        responses = [r for engine, rounds in over.items() for r in self._brought(engine, rounds)]
        self._book.hold(responses, caches_stay=self._config.keeps_caches)
        return self._book.take_returned() + responses

    def go_on(self) -> None:
        """The engines go on with what waits since a park, beside what the next `submit` brings."""
        self._book.go_on()

    def _call(self) -> None:
        """Keeps two rounds under way on every engine that has work; what waits to be sent goes with the next one."""
        for engine, rounds in enumerate(self._rounds):
            ranks = self._ranks(engine)
            while self._book.has_work(ranks) and len(rounds) < CALLS_UNDER_WAY:
                self._since[engine] = self._since[engine] if rounds else time.monotonic()
                stint = self._stints.next(ranks)
                rounds.append({rank: self._tick(rank, stint) for rank in ranks})

    def _ranks(self, engine: int) -> range:
        return range(engine * self._dp, (engine + 1) * self._dp)

    def _tick(self, rank: int, stint: Stint) -> ObjectRef[ResponseBatch]:
        asked, goes_on = self._book.to_send(rank), self._book.to_go_on(rank)
        return self.start_on(
            rank, RolloutActor.tick, asked, self.tick_steps // TICK_BEATS, goes_on, *stint.numbers()
        )

    def _park(self, rank: int) -> ObjectRef[ResponseBatch]:
        return self.start_on(rank, RolloutActor.park, self._book.to_send(rank), self.tick_steps)

    def _brought(self, engine: int, rounds: Sequence[dict[int, ObjectRef[ResponseBatch]]]) -> list[Response]:
        """What these rounds of an engine bring, in order; waits for their end. Nothing where it is lost meanwhile."""
        calls = {
            self.name(rank) + (f", call {number}" if len(rounds) > 1 else ""): call
            for number, round_ in enumerate(rounds, 1)
            for rank, call in round_.items()
        }
        batches = self._answers(engine, calls, deadline_seconds=self._seconds(len(rounds)))
        if batches is None:
            return []
        for rank, batch in zip(rounds[-1], batches[-self._dp :], strict=True):
            self._stints.heard(rank, batch.bell)
        return self._arrived(batches)

    def _arrived(self, batches: Sequence[ResponseBatch]) -> list[Response]:
        responses = [response for batch in batches for response in batch.responses()]
        self._book.arrived(responses)
        return responses

    def generate(self, requested: Round, deadline_seconds: float) -> list[ResponseBatch]:
        """All responses by one blocking call of each engine; for measurements."""
        shares = self._book.shares(requested)
        ranks = [r for r in range(len(self.actors)) if any(s // self._dp == r // self._dp for s in shares)]
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

    # -- how long a call lasts -----------------------------------------------------------------------------------

    def be_patient(self, seconds: float, awaited: int = -1) -> None:
        """How long a call may last from here on though it has something to bring, or until it has ended all that its engine had of
        prompts up to the index `awaited`; with 0 those under way end soon."""
        self._stints.be_patient(seconds, awaited)

    # -- engines that are lost, and those that come in their places ----------------------------------------------

    def _answers[R](
        self, engine: int, calls: dict[str, ObjectRef[R]], *, deadline_seconds: float | None = None
    ) -> list[R] | None:
        """Results of calls of one engine; None where it is lost and the run goes on without it."""
        asked = self.actors[self._ranks(engine)[0]]
        try:
            return list(self.wait(calls, deadline_seconds=deadline_seconds).values())
        except WorkerLost as error:
            if not self._fleet.replaces:
                raise
            if self.actors[self._ranks(engine)[0]] is asked:  # else it was lost in the wait
                self._lose(self._ranks(engine)[0], str(error))
            return None

    def _seconds(self, rounds: int) -> float | None:
        deadline = self._config.rollout.step_deadline_seconds + self._stints.longest
        return deadline * rounds if self._fleet.replaces else None

    def watch(self) -> None:
        """Drops the engines whose processes are gone and looks after those that are started. WorkerLost where the run
        survives no more."""
        first_of = {number // self._dp: number for number in reversed(self.dead())}
        for number in first_of.values():
            self._lose(number, self.death(number))
        for engine, why in self._fleet.look().items():
            number = self._ranks(engine)[0]
            self._lose(number, f"{self.name(number)}, started in the place of a lost one, {why}")
        if told := self._fleet.metrics():
            self._clock.note(told | {"rollout/started_over": float(self._book.num_started_over)})

    def _lose_late(self, engines: Collection[int]) -> None:
        seconds, now = self._seconds(1), time.monotonic()
        for engine in engines:
            if seconds and self._rounds[engine] and now - self._since[engine] > seconds:
                number = self._ranks(engine)[0]
                self._lose(
                    number,
                    f"{self.name(number)} did not answer within {seconds:g} s (rollout.step_deadline_seconds, and what a call may last) "
                    f"in phase {self._clock.current}",
                )

    def _lose(self, number: int, cause: str) -> None:
        """Goes on without the engine of this process, whose requests come back and whose place is taken anew; WorkerLost where
        the run survives no more."""
        engine, said = number // self._dp, last_word(self._log_folder, self.name(number))
        told = self._fleet.lose(engine, cause + (f" ({said})" if said else ""))
        count = self._book.lose(self._ranks(engine))
        log.warning("%s; of its requests %d are started over", told, count)
        self._rounds[engine].clear()

    def _replace(self, engine: int) -> Start:
        """Other processes in the place of an engine, whose first ones are ended."""
        (rank,) = self._ranks(engine)
        part = self._parts[rank]
        self._stints.forget(rank)
        self.make_anew(rank)
        for number in self.further.beside(part):
            self.further.make_anew(number)
        meeting = None if part.is_whole else self.start_on(rank, RolloutActor.meeting)
        calls = self._start(rank, meeting)
        return calls[self.name(rank)], self.start_on(rank, RolloutActor.prepare_sync)

    def _await_engine(self, timeout_seconds: float) -> None:
        """While none serves: waits for one that is started, and has it brought in where that is possible now."""
        self._fleet.look(timeout_seconds)
        self.watch()
        if self._fleet.is_up:
            self.when_up()

    def bring_in(self) -> dict[int, str]:
        """The engines that are up take part in weight syncs from here on, and serve after the next; the addresses of their
        ranks by number. Waits for one where none serves. WeightSyncError where the plan is not theirs."""
        self.watch()
        while not (self._fleet.serving or self._fleet.is_up):
            self._fleet.look(1.0)
            self.watch()
        addresses, tp = {}, self._config.rollout.tp
        for engine, told in self._fleet.bring_in().items():
            digests = [digest for _, _, digest in told]
            if digests != self._digests[engine]:
                raise WeightSyncError(
                    f"{self.name(engine)}, started in the place of a lost one, holds other tensors: {digests}, before {self._digests[engine]}"
                )
            self._book.regain(engine)
            addresses |= {engine * tp + n: address for n, (address, _, _) in enumerate(told)}
        return addresses

    @property
    def serving(self) -> list[int]:
        """The engines that take part in weight syncs."""
        return self._fleet.serving

    def without(self, engines: Collection[int]) -> list[int]:
        """The engine ranks of all others."""
        size = self._config.rollout.ranks
        ranks = (range(e * size, (e + 1) * size) for e in range(len(self._rounds)) if e not in engines)
        return list(itertools.chain.from_iterable(ranks))

    def give_up(self, names: Iterable[str], why: str = "did not answer") -> None:
        """Drops the engines of these names, as far as they serve and engines have such names."""
        by_name = {self.name(number): number for number in self.numbers()}
        for name in names:
            if name in by_name:
                self._lose(by_name[name], f"{name} {why} in phase {self._clock.current}")

    # -- weight sync ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drop weights and KV cache on all engines, if they give their memory away."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.sleep())

    def wake(self, tag: str) -> None:
        """Takes the memory of one kind back: "weights" or "kv_cache"."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.wake([tag]))

    def engine_ranks(self) -> list[EngineRank]:
        """All engine ranks, in slot order; WeightSyncError where an engine lacks tensors of the trainer, or
        has others."""
        told: list[list[RankFacts]] = self.on_all(RolloutActor.prepare_sync)
        self._digests = [[digest for _, _, digest in part] for part in told]
        manifests = self._manifests(self._digests)
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
        if self._book.has_work(range(len(self.actors))):
            return {}
        calls = self.start_on_all(lambda actor: actor.engine.memory_use())
        names = [self.name(number) for number in self.numbers()]
        told = [
            self._answers(number // self._dp, {name: calls[name]}, deadline_seconds=self._seconds(1))
            for number, name in zip(self.numbers(), names, strict=True)
        ]
        return tightest(rank for answers in told if answers for engine in answers for rank in engine)

    def receive(
        self, session: Session, engines: Collection[int] | None = None
    ) -> dict[str, ObjectRef[dict[str, Any]]]:
        """Starts the side of every engine, or of these, of a weight sync; the caller waits for it together with the
        trainer's."""
        asked = [n for n in self.numbers() if engines is None or n // self._dp in engines]
        return {self.name(n): self.start_on(n, lambda actor: actor.engine.receive(session)) for n in asked}
