"""The processes of all engines: started, watched, replaced, and told what is not a request.

Requests go past this, from the rollout thread to the engines' sockets (mrl/rollout/engine_pool.py). An engine that dies, or
makes no step, is dropped where the run survives that (fleet.py): what it had is generated elsewhere, and another process is
started in its place, which the next weight sync brings in.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mrl import errors
from mrl.config.root import Config
from mrl.errors import MrlError, PeerLost, WeightSyncError, WorkerLost
from mrl.launch.workers.actor_group import GRACE_SECONDS, ActorGroup
from mrl.launch.workers.actor_log import last_word
from mrl.launch.workers.engine_places import places
from mrl.launch.workers.fleet import Fleet, RankFacts, Start
from mrl.launch.workers.headless_actor import HeadlessActor, HeadlessGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.loops.rollout_thread import RolloutThread
from mrl.models.families import family_of
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.resharding.planner.agreement import as_one_rank, require_agreement
from mrl.rollout.part import schedulers
from mrl.training.hf.hf_folder import read_config

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


log = logging.getLogger(__name__)


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
        **options: Any,
    ) -> None:
        """`sleeps`: the engines give their memory away between rounds. `options`: environment and log folder of the actors."""
        self._dp, self.placement = config.rollout.dp, placement
        self.parts = schedulers(config, placement.nodes)
        super().__init__(self.actor_class, config, clock, **places(self.parts, config, placement), **options)
        further = [each for part in self.parts for each in part.further()]
        self.further = HeadlessGroup(config, clock, **places(further, config, placement), **options)
        self._sleeps, self._num_engines = sleeps, len(self.actors) // self._dp
        self.secret = secrets.token_bytes(32)
        """What the driver proves to know when it connects to an engine."""
        self._rollouts: RolloutThread | None = None
        self.workers: ActorGroup[Any] | None = None
        """The rollout workers of the engines' nodes, if there are any (rollout_workers.py)."""
        self.worker_metrics: Callable[[], dict[str, float]] = dict
        """What is noted of them once any was lost."""
        self._digests: list[list[str]] = []
        self.when_up: Callable[[], None] = lambda: None
        """Called when no engine serves and one waits to be brought in."""
        self._fleet = Fleet(
            self._num_engines,
            clock,
            most=config.rollout.replace,
            deadline_seconds=config.launch.start_deadline_seconds,
            start=self._replace,
        )

    def numbers(self) -> Sequence[int]:
        return [rank for engine in self._fleet.serving for rank in self._ranks(engine)]

    def name(self, number: int) -> str:
        return self.parts[number].name

    def start(self) -> dict[str, ObjectRef[None]]:
        """Starts vLLM everywhere; the caller waits for it."""
        firsts = [n for n, part in enumerate(self.parts) if not (part.is_whole or part.dp_rank)]
        deadline = self._config.launch.start_deadline_seconds
        asked = {self.name(first): self.start_on(first, RolloutActor.meeting) for first in firsts}
        meetings = dict(zip(firsts, self.wait(asked, deadline_seconds=deadline).values(), strict=True))
        calls: dict[str, ObjectRef[None]] = {}
        for number, part in enumerate(self.parts):
            calls |= self._start(number, meetings.get(number - part.dp_rank))
        return calls

    def _start(self, number: int, meeting: Any) -> dict[str, ObjectRef[None]]:
        """Starts a rank, on all its nodes."""
        beside = self.further.beside(self.parts[number])
        handles = [self.further.actors[n] for n in beside]
        calls = {self.name(number): self.start_on(number, RolloutActor.start, meeting, self.secret, *handles)}
        others = {
            self.further.name(n): self.further.start_on(n, HeadlessActor.start, meeting) for n in beside
        }
        return calls | others

    # -- requests ------------------------------------------------------------------------------------------------

    def attach(self, rollouts: RolloutThread) -> None:
        """Connect all engines to what generates over them."""
        self._rollouts = rollouts
        for number, address in zip(self.numbers(), self.on_all(RolloutActor.door), strict=True):
            rollouts.connect(number, address)

    def resume(self) -> None:
        """Let engines step that were brought in while the others did."""
        if self._rollouts is not None:
            self._rollouts.resume_engines()

    async def block_of(self, number: int, block: int) -> Any:
        """Return the handle of a block of routes that an engine keeps."""
        (handle,) = await self.start_on(number, RolloutActor.take_block, block)
        return handle

    # -- engines that are lost, and those that come in their places ----------------------------------------------

    def watch(self) -> None:
        """Drop the engines that are gone and look after those that are started.

        Raises:
            WorkerLost: The run survives no more losses.
            MrlError: What ended an engine, if it is one of ours.
        """
        first_of = {number // self._dp: number for number in reversed(self.dead())}
        for number in first_of.values():
            self._lose(number, self.death(number))
        if self._rollouts is not None:
            for number, (why, kind) in self._rollouts.take_lost().items():
                if number in self.numbers():
                    self._judge(number, why, kind)
            if self._fleet.replaces:
                self._lose_late(self._rollouts)
        for engine, why in self._fleet.look().items():
            number = self._ranks(engine)[0]
            self._lose(number, f"{self.name(number)}, started in the place of a lost one, {why}")
        if told := self._fleet.metrics() | self.worker_metrics():
            started_over = self._rollouts.num_started_over if self._rollouts is not None else 0
            self._clock.note(told | {"rollout/started_over": float(started_over)})
        if not self._fleet.serving and self._fleet.is_up:
            self.when_up()

    def _judge(self, number: int, why: str, kind: str) -> None:
        """Say what an engine's broken connection means: its process may have died, or it named an error of ours."""
        cause = getattr(errors, kind, None)
        if cause is not None and issubclass(cause, MrlError) and not issubclass(cause, PeerLost | WorkerLost):
            raise cause(f"{self.name(number)}, phase {self._clock.current}: {why}")
        deadline = time.monotonic() + GRACE_SECONDS
        ranks = self._ranks(number // self._dp)
        while time.monotonic() < deadline:  # a death is told before what follows from it
            if gone := [rank for rank in self.dead() if rank in ranks]:
                self._lose(gone[0], self.death(gone[0]))
                return
            time.sleep(0.1)
        others = ", ".join(self.name(rank) for rank in ranks if rank != number)
        if kind == "PeerLost" and others:
            raise WorkerLost(f"{others} kept others waiting in phase {self._clock.current}: {why}")
        self._lose(number, f"{self.name(number)} failed in phase {self._clock.current}: {why}")

    def _lose_late(self, rollouts: RolloutThread) -> None:
        seconds = self._config.rollout.step_deadline_seconds
        for number in rollouts.late(seconds):
            self._lose(
                number,
                f"{self.name(number)} made no step within rollout.step_deadline_seconds = {seconds:g} s in phase "
                f"{self._clock.current}",
            )

    def _lose(self, number: int, cause: str) -> None:
        """Go on without the engine of this process, whose requests are generated elsewhere and whose place is taken anew;
        WorkerLost if the run survives no more."""
        engine, said = number // self._dp, last_word(self._log_folder, self.name(number))
        told = self._fleet.lose(engine, cause + (f" ({said})" if said else ""))
        log.warning("%s; its requests are started over", told)
        if self._rollouts is not None:
            for rank in self._ranks(engine):
                self._rollouts.give_up(rank, cause)

    def _replace(self, engine: int) -> Start:
        """Start other processes in the place of an engine, whose first ones are ended."""
        (rank,) = self._ranks(engine)
        part = self.parts[rank]
        self.make_anew(rank)
        for number in self.further.beside(part):
            self.further.make_anew(number)
        meeting = None if part.is_whole else self.start_on(rank, RolloutActor.meeting)
        calls = self._start(rank, meeting)
        return calls[self.name(rank)], self.start_on(rank, RolloutActor.arrive)

    def bring_in(self) -> dict[int, str]:
        """Let the engines that are up take part in weight syncs from here on, and serve after the next; return the addresses of
        their ranks by number. Waits for one if none serves. WeightSyncError if the plan is not theirs."""
        self.watch()
        while not (self._fleet.serving or self._fleet.is_up):
            self._fleet.look(1.0)
            self.watch()
        addresses, tp = {}, self._config.rollout.tp
        for engine, (told, door) in self._fleet.bring_in().items():
            digests = [digest for _, _, digest in told]
            if digests != self._digests[engine]:
                raise WeightSyncError(
                    f"{self.name(engine)}, started in the place of a lost one, holds other tensors: {digests}, before {self._digests[engine]}"
                )
            if self._rollouts is not None:
                self._rollouts.connect(engine, door)
            addresses |= {engine * tp + n: address for n, (address, _, _) in enumerate(told)}
        return addresses

    @property
    def num_lost(self) -> int:
        """Return the number of engines lost so far."""
        return self._fleet.num_lost

    @property
    def serving(self) -> list[int]:
        """Return the engines that take part in weight syncs."""
        return self._fleet.serving

    def without(self, engines: Collection[int]) -> list[int]:
        """Return the engine ranks of all others."""
        size = self._config.rollout.ranks
        ranks = (range(e * size, (e + 1) * size) for e in range(self._num_engines) if e not in engines)
        return list(itertools.chain.from_iterable(ranks))

    def give_up(self, names: Iterable[str], why: str = "did not answer") -> None:
        """Drop the engines of these names, as far as they serve and engines have such names."""
        by_name = {self.name(number): number for number in self.numbers()}
        for name in names:
            if name in by_name:
                self._lose(by_name[name], f"{name} {why} in phase {self._clock.current}")

    def _ranks(self, engine: int) -> range:
        return range(engine * self._dp, (engine + 1) * self._dp)

    # -- weight sync ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drop weights and KV cache on all engines, if they give their memory away."""
        if self._sleeps:
            self.on_all(RolloutActor.on_engine, lambda engine: engine.sleep())

    def wake(self, tag: str) -> None:
        """Takes the memory of one kind back: "weights" or "kv_cache"."""
        if self._sleeps:
            self.on_all(RolloutActor.on_engine, lambda engine: engine.wake([tag]))

    def engine_ranks(self) -> list[EngineRank]:
        """Return all engine ranks, in slot order; WeightSyncError if an engine lacks tensors of the trainer, or has others."""
        told: list[list[RankFacts]] = self.on_all(RolloutActor.prepare_sync)
        self._digests = [[digest for _, _, digest in part] for part in told]
        calls = {
            self.name(number): self.start_on(number, RolloutActor.manifests, digests)
            for number, digests in first_with_each(self._digests).items()
        }
        manifests = {digest: m for part in self.wait(calls).values() for digest, m in part.items()}
        ranks = [
            EngineRank(address, device, manifests[digest])
            for part in told
            for address, device, digest in part
        ]
        if self._dp > 1:
            require_whole_experts(ranks, self._config)
        return ranks

    def memory_use(self) -> dict[str, float]:
        """Return the tightest figures of all engine ranks (observe/memory_use.py)."""
        try:
            told = self.on_all(RolloutActor.on_engine, lambda engine: engine.memory_use())
        except WorkerLost:
            if not self._fleet.replaces:
                raise
            return {}  # `watch` finds who it was
        return tightest(rank for engine in told for rank in engine)

    def receive(self, session: Session, engines: Collection[int] | None = None) -> dict[str, ObjectRef[Any]]:
        """Starts the side of every engine, or of these, of a weight sync; the caller waits for it together with the
        trainer's."""
        asked = [n for n in self.numbers() if engines is None or n // self._dp in engines]
        return {
            self.name(n): self.start_on(n, RolloutActor.on_engine, lambda engine: engine.receive(session))
            for n in asked
        }


def first_with_each(digests: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """Return which manifests to ask of which process: each of the first that has it. Engines are alike, and a manifest is
    megabytes."""
    first: dict[str, int] = {}
    for number, listed in enumerate(digests):
        for digest in listed:
            first.setdefault(digest, number)
    return {n: [d for d, at in first.items() if at == n] for n in sorted(set(first.values()))}


def require_whole_experts(ranks: Sequence[EngineRank], config: Config) -> None:
    """Raise WeightSyncError unless the ranks of each engine together take the whole checkpoint; what one of them takes alone says
    nothing."""
    hf, size = read_config(config.model.path), config.rollout.ranks
    checkpoint = as_one_rank(family_of(hf).checkpoint_tensors(hf))
    manifests = [rank.manifest for rank in ranks]
    engines = [manifests[first : first + size] for first in range(0, len(manifests), size)]
    for engine in {tuple(m.digest for m in engine): engine for engine in engines}.values():
        require_agreement([checkpoint], engine)
