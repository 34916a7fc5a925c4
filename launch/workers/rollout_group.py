"""Engine processes: start, watch and replace them, and run all calls that are not requests.

Requests go directly from the rollout thread to the engines' sockets (mrl/rollout/engine_pool.py). An engine
that dies or makes no step is dropped if the run may lose one (fleet.py): its requests are generated
elsewhere, and the next weight sync brings in a new process in its place.
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
from mrl.rollout.engine_process import schedulers
from mrl.training.hf.hf_folder import read_config

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


log = logging.getLogger(__name__)


class RolloutGroup(ActorGroup[RolloutActor]):
    """vLLM engines of a run; engine e has the e-th dp x tp slots of `Config.engine_slots`.

    Each dp rank has a process (mrl/rollout/engine_process.py); numbers count dp ranks over all engines. If
    its tp slots are on several nodes, its process is on the first one, and `further` has the others.
    """

    kind = "engine"
    actor_class: type[RolloutActor] = RolloutActor

    def __init__(
        self, config: Config, placement: Placement, clock: PhaseClock, *, sleeps: bool, **options: Any
    ) -> None:
        """Start the actors, with `options`; `sleeps`: engines free their memory between rounds."""
        self._dp, self.placement = config.rollout.dp, placement
        self.parts = schedulers(config, placement.nodes)
        super().__init__(self.actor_class, config, clock, **places(self.parts, config, placement), **options)
        further = [other for part in self.parts for other in part.other_nodes()]
        self.further = HeadlessGroup(config, clock, **places(further, config, placement), **options)
        self._sleeps, self._num_engines = sleeps, len(self.actors) // self._dp
        self.secret = secrets.token_bytes(32)
        """Secret that authenticates the driver to an engine."""
        self._rollouts: RolloutThread | None = None
        self.workers: ActorGroup[Any] | None = None
        """Rollout workers of the engines' nodes, if any (rollout_workers.py)."""
        self.worker_metrics: Callable[[], dict[str, float]] = dict
        """Metrics of rollout workers; empty until one is lost."""
        self._digests: list[list[str]] = []
        self.when_up: Callable[[], None] = lambda: None
        """Called if no engine serves and one waits to be brought in."""
        self._fleet = Fleet(
            self._num_engines,
            clock,
            most=config.rollout.max_replacements,
            deadline_seconds=config.launch.start_deadline_seconds,
            start=self._replace,
        )

    def numbers(self) -> Sequence[int]:
        return [rank for engine in self._fleet.serving for rank in self._ranks(engine)]

    def name(self, number: int) -> str:
        return self.parts[number].name

    def start(self) -> dict[str, ObjectRef[None]]:
        """Start vLLM on all ranks; the caller waits for it."""
        firsts = [n for n, part in enumerate(self.parts) if not (part.is_whole or part.dp_rank)]
        deadline = self._config.launch.start_deadline_seconds
        ports = {self.name(first): self.start_on(first, RolloutActor.rendezvous) for first in firsts}
        meetings = dict(zip(firsts, self.wait(ports, deadline_seconds=deadline).values(), strict=True))
        calls: dict[str, ObjectRef[None]] = {}
        for number, part in enumerate(self.parts):
            calls |= self._start(number, meetings.get(number - part.dp_rank))
        return calls

    def _start(self, number: int, meeting: Any) -> dict[str, ObjectRef[None]]:
        """Start a rank on all its nodes."""
        beside = self.further.beside(self.parts[number])
        handles = [self.further.actors[n] for n in beside]
        calls = {self.name(number): self.start_on(number, RolloutActor.start, meeting, self.secret, *handles)}
        others = {
            self.further.name(n): self.further.start_on(n, HeadlessActor.start, meeting) for n in beside
        }
        return calls | others

    # -- requests --------------------------------------------------------------------------------------------

    def attach(self, rollouts: RolloutThread) -> None:
        """Connect the rollout thread to all engines."""
        self._rollouts = rollouts
        for number, address in zip(self.numbers(), self.on_all(RolloutActor.address_for_driver), strict=True):
            rollouts.connect(number, address)

    def resume(self) -> None:
        """Resume engines that were brought in while the others ran."""
        if self._rollouts is not None:
            self._rollouts.resume_engines()

    async def block_of(self, number: int, block: int) -> Any:
        """Return the reference to a route block that an engine keeps."""
        (handle,) = await self.start_on(number, RolloutActor.take_block, block)
        return handle

    # -- lost engines and their replacements -----------------------------------------------------------------

    def watch(self) -> None:
        """Drop engines that are gone and check those that are starting.

        Raises:
            WorkerLost: The run may lose no more engines.
            MrlError: An engine ended with this typed error.
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
            self._lose(number, f"{self.name(number)}, the replacement of a lost one, {why}")
        if metrics := self._fleet.metrics() | self.worker_metrics():
            started_over = self._rollouts.num_started_over if self._rollouts is not None else 0
            self._clock.note(metrics | {"rollout/started_over": float(started_over)})
        if not self._fleet.serving and self._fleet.is_up:
            self.when_up()

    def _judge(self, number: int, why: str, kind: str) -> None:
        """Handle an engine's broken connection: raise its typed error, or drop the dead or failed engine."""
        cause = getattr(errors, kind, None)
        if cause is not None and issubclass(cause, MrlError) and not issubclass(cause, PeerLost | WorkerLost):
            raise cause(f"{self.name(number)}, phase {self._clock.current}: {why}")
        deadline = time.monotonic() + GRACE_SECONDS
        ranks = self._ranks(number // self._dp)
        while time.monotonic() < deadline:  # report a death before its consequences
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
                f"{self.name(number)} made no step within rollout.step_deadline_seconds = {seconds:g} s in "
                f"phase {self._clock.current}",
            )

    def _lose(self, number: int, cause: str) -> None:
        """Drop and replace this process's engine; raise WorkerLost if the run may lose no more."""
        engine, reason = number // self._dp, last_word(self._log_folder, self.name(number))
        message = self._fleet.replace(engine, cause + (f" ({reason})" if reason else ""))
        log.warning("%s; its requests are retried elsewhere", message)
        if self._rollouts is not None:
            for rank in self._ranks(engine):
                self._rollouts.give_up(rank, cause)

    def _replace(self, engine: int) -> Start:
        """Kill an engine's processes and start new ones in their place."""
        (rank,) = self._ranks(engine)
        part = self.parts[rank]
        self.make_anew(rank)
        for number in self.further.beside(part):
            self.further.make_anew(number)
        meeting = None if part.is_whole else self.start_on(rank, RolloutActor.rendezvous)
        calls = self._start(rank, meeting)
        return calls[self.name(rank)], self.start_on(rank, RolloutActor.replacement_facts)

    def bring_in(self) -> dict[int, str]:
        """Add engines that are up to weight syncs, to serve after the next; return their ranks' addresses by
        number.

        Waits for one if none serves. Raises WeightSyncError if an engine does not fit the plan.
        """
        self.watch()
        while not (self._fleet.serving or self._fleet.is_up):
            self._fleet.look(1.0)
            self.watch()
        addresses, tp = {}, self._config.rollout.tp
        for engine, (ranks, door) in self._fleet.bring_in().items():
            digests = [digest for _, _, digest in ranks]
            if digests != self._digests[engine]:
                raise WeightSyncError(
                    f"{self.name(engine)}, the replacement of a lost one, has other tensors: manifests "
                    f"{digests}, expected {self._digests[engine]}"
                )
            if self._rollouts is not None:
                self._rollouts.connect(engine, door)
            addresses |= {engine * tp + n: address for n, (address, _, _) in enumerate(ranks)}
        return addresses

    @property
    def num_lost(self) -> int:
        """Number of engines lost so far."""
        return self._fleet.num_lost

    @property
    def serving(self) -> list[int]:
        """Engines that take part in weight syncs."""
        return self._fleet.serving

    def without(self, engines: Collection[int]) -> list[int]:
        """Return the engine ranks of all other engines."""
        size = self._config.rollout.ranks
        ranks = (range(e * size, (e + 1) * size) for e in range(self._num_engines) if e not in engines)
        return list(itertools.chain.from_iterable(ranks))

    def drop(self, names: Iterable[str], why: str = "did not respond") -> None:
        """Drop the serving engines among these names; ignore other names."""
        by_name = {self.name(number): number for number in self.numbers()}
        for name in names:
            if name in by_name:
                self._lose(by_name[name], f"{name} {why} in phase {self._clock.current}")

    def _ranks(self, engine: int) -> range:
        return range(engine * self._dp, (engine + 1) * self._dp)

    # -- weight sync -----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free weights and KV cache on all engines, if they sleep."""
        if self._sleeps:
            self.on_all(RolloutActor.on_engine, lambda engine: engine.sleep())

    def wake(self, tag: str) -> None:
        """Restore the memory of one tag on all engines: "weights" or "kv_cache"."""
        if self._sleeps:
            self.on_all(RolloutActor.on_engine, lambda engine: engine.wake([tag]))

    def engine_ranks(self) -> list[EngineRank]:
        """Return all engine ranks in slot order. WeightSyncError if engine and trainer tensors differ."""
        facts: list[list[RankFacts]] = self.on_all(RolloutActor.prepare_sync)
        self._digests = [[digest for _, _, digest in part] for part in facts]
        calls = {
            self.name(number): self.start_on(number, RolloutActor.manifests, digests)
            for number, digests in first_with_each(self._digests).items()
        }
        manifests = {digest: m for part in self.wait(calls).values() for digest, m in part.items()}
        ranks = [
            EngineRank(address, device, manifests[digest])
            for part in facts
            for address, device, digest in part
        ]
        if self._dp > 1:
            require_whole_experts(ranks, self._config)
        return ranks

    def memory_use(self) -> dict[str, float]:
        """Return the tightest values over all engine ranks (observe/memory_use.py)."""
        try:
            values = self.on_all(RolloutActor.on_engine, lambda engine: engine.memory_use())
        except WorkerLost:
            if not self._fleet.replaces:
                raise
            return {}  # `watch` finds the lost engine
        return tightest(rank for engine in values for rank in engine)

    def receive[R](
        self,
        session: Session,
        engines: Collection[int] | None = None,
        part: Callable[[RolloutActor, Session], R] = RolloutActor.receive,
    ) -> dict[str, ObjectRef[R]]:
        """Start all engines' side of a weight sync, or that of `engines`; the caller waits for both sides.

        `part`: `RolloutActor.stage` or `switch` is half of it."""
        numbers = [n for n in self.numbers() if engines is None or n // self._dp in engines]
        return {self.name(n): self.start_on(n, part, session) for n in numbers}


def first_with_each(digests: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """Return the manifest digests to fetch from each process, each only once: a manifest has megabytes."""
    first: dict[str, int] = {}
    for number, process_digests in enumerate(digests):
        for digest in process_digests:
            first.setdefault(digest, number)
    return {n: [d for d, at in first.items() if at == n] for n in sorted(set(first.values()))}


def require_whole_experts(ranks: Sequence[EngineRank], config: Config) -> None:
    """Raise WeightSyncError if the ranks of an engine together do not take the whole checkpoint."""
    hf, size = read_config(config.model.path), config.rollout.ranks
    checkpoint = as_one_rank(family_of(hf).checkpoint_tensors(hf))
    manifests = [rank.manifest for rank in ranks]
    engines = [manifests[first : first + size] for first in range(0, len(manifests), size)]
    for engine in {tuple(m.digest for m in engine): engine for engine in engines}.values():
        require_agreement([checkpoint], engine)
