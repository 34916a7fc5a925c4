"""Rollout workers: one process per node of engines that runs the coroutines of groups.

Ray starts them and carries the prompts of groups; everything else uses sockets
(mrl/trajectories/worker_messages.py). A worker has connections to its node's engines and its own reward
workers and environments, which the driver has otherwise. A lost worker is reported and replaced; its engines
pause when its connections end (mrl/rollout/engine_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mrl.agents.pool import EnvironmentWorkers
from mrl.config.root import Config
from mrl.data.tokenise import load_tokenizer_for
from mrl.errors import ConfigError, MrlError, WorkerLost
from mrl.launch.workers.actor_group import GRACE_SECONDS, ActorGroup, close_all, first_line, is_death
from mrl.launch.workers.deaths import death_cause
from mrl.launch.workers.environments import EnvironmentRules, check_environments
from mrl.launch.workers.reward_workers import check_rewards, reward_pool
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.loops.worker_thread import WorkerThread
from mrl.observe.driver_memory import tune_driver_memory
from mrl.observe.phases import PhaseClock
from mrl.rollout.engine_client import Address
from mrl.samples import Prompt
from mrl.trajectories.environment_rollout import EpisodeRules
from mrl.trajectories.worker_messages import GroupStart

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Workers that a start of a run may lose; 0 for a deterministic run."""
CLOSE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Placement and engines of one worker."""

    node: int
    slot: int
    """Slot of its node where Ray places it."""
    engines: tuple[int, ...]
    """Numbers of its node's engines."""
    names: tuple[str, ...]
    """Names of all engines of the run."""
    by_index: bool
    """True if a prompt's index determines its engine."""
    max_environments: int | None
    """Its share of agent.max_environments."""


def worker_places(config: Config, rollout: RolloutGroup, *, by_index: bool) -> list[WorkerPlace]:
    """Return one place per node on which an engine starts, in node order; the dp ranks of an engine share a
    worker.

    Raises:
        ConfigError: agent.max_environments is less than one per worker.
    """
    homes: dict[int, int] = {}
    engines: dict[int, list[int]] = {}
    slots: dict[int, int] = {}
    for number, part in enumerate(rollout.parts):
        slot = part.slots(config.engine_slots, tp=config.rollout.tp)[0]
        home = homes.setdefault(part.engine, rollout.placement.nodes[slot])
        engines.setdefault(home, []).append(number)
        slots.setdefault(home, slot)
    names, most = (
        tuple(rollout.name(n) for n in rollout.numbers()),
        config.agent and config.agent.max_environments,
    )
    if most is not None and most < len(engines):
        raise ConfigError(
            f"agent.max_environments = {most} with rollout.workers = node: each of {len(engines)} rollout "
            f"workers opens at least one environment; set agent.max_environments to {len(engines)} or more"
        )
    return [
        WorkerPlace(
            node,
            slots[node],
            tuple(engines[node]),
            names,
            by_index,
            None if most is None else (most + place) // len(engines),
        )
        for place, node in enumerate(sorted(engines))
    ]


class RolloutWorkerActor:
    """Ray actor of a node's rollout worker."""

    def __init__(self, config: Config, place: WorkerPlace, log_folder: str) -> None:
        import ray

        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"rollouts-{place.node}")
        self._config, self._place = config, place
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._stack = contextlib.ExitStack()

    def start(self, secret: bytes, trial: Sequence[Prompt], described: Mapping[str, Any]) -> Address:
        """Start reward workers and environments; return the address for the driver.

        Args:
            secret: Secret that authenticates the driver here, and this process to the engines.
            trial: Prompts to try the verifiers with.
            described: Descriptions of the environments on the driver's node, by key.

        Raises:
            ConfigError: A verifier or an environment does not work here, or an environment differs.
        """
        config, place = self._config, self._place
        check_rewards(config.reward, trial)
        self._rewards = self._stack.enter_context(
            reward_pool(config, config.reward, place=f"node-{place.node}")
        )
        acting, environments = None, None
        if config.agent is not None:
            acting = check_environments(config, load_tokenizer_for(config.model))
            require_described(acting, described)
            environments = self._stack.enter_context(EnvironmentWorkers.of(config.agent))
        self._worker = WorkerThread(
            self._listener,
            secret,
            place.names,
            self._rewards,
            run_seed=config.run.seed,
            by_index=place.by_index,
            environments=environments,
            **({"rules_of": acting.rules_of, "max_environments": place.max_environments} if acting else {}),
        )
        tune_driver_memory()
        return self._listener.getsockname()[:2]

    def begin(self, groups: Sequence[GroupStart]) -> None:
        """Begin groups."""
        self._worker.begin(groups)

    def drop(self, groups: Sequence[int]) -> None:
        """Drop groups, by their numbers."""
        self._worker.drop(groups)

    def close(self) -> None:
        """Stop everything it started, and log the number of verdicts by kind."""
        if hasattr(self, "_worker"):
            self._worker.close()
            log.info("verdicts by kind: %s", dict(self._rewards.counts()))
        self._stack.close()


def descriptions(acting: EnvironmentRules | None) -> dict[str, Any]:
    """Return each environment's description, by key."""
    if acting is None:
        return {}
    return {
        key: (dict(rules.tools), rules.replayable) if isinstance(rules, EpisodeRules) else "program"
        for key, (rules, _) in acting.rules.items()
    }


def require_described(acting: EnvironmentRules | None, described: Mapping[str, Any]) -> None:
    """Raise ConfigError for an environment whose description differs from the driver's node (`described`)."""
    for key, description in descriptions(acting).items():
        if description != described[key]:
            raise ConfigError(
                f"the environment {key!r} differs from the one on the driver's node; install the same on all "
                "nodes"
            )


class RolloutWorkerGroup(ActorGroup[RolloutWorkerActor]):
    """Rollout workers of a run (`WorkerProcesses` of mrl/trajectories/remote_rollouts.py)."""

    kind = "rollout worker of node"

    def __init__(
        self,
        config: Config,
        rollout: RolloutGroup,
        clock: PhaseClock,
        *,
        trial: Sequence[Prompt],
        acting: EnvironmentRules | None,
        environment: Mapping[str, str],
        log_folder: str,
    ) -> None:
        """Start the workers. `trial`: prompts to try verifiers with; `acting`: the driver's environments."""
        self.by_index = config.loop.deterministic or config.loop.schedule == "on_policy"
        self.places = worker_places(config, rollout, by_index=self.by_index)
        super().__init__(
            RolloutWorkerActor,
            config,
            clock,
            strategies=rollout.placement.strategies(place.slot for place in self.places),
            slot_share=0.0,
            gpus=0.0,
            environment=environment,
            facts=self.places,
            log_folder=log_folder,
        )
        self._rollout, self._trial, self._described = rollout, trial, descriptions(acting)
        self.secret = rollout.secret
        self.names = [self.name(number) for number in self.numbers()]
        self.engines = [place.engines for place in self.places]
        self._most = 0 if config.loop.deterministic else MOST_LOSSES
        self.num_lost = 0
        self._starts = {number: self._start(number) for number in self.numbers()}
        """Start calls that have not been waited for."""

    @contextlib.contextmanager
    def started(self) -> Iterator[RolloutWorkerGroup]:
        """Attach the workers to the engines; close them at the end."""
        self._rollout.workers, self._rollout.worker_metrics = self, self._metrics
        try:
            yield self
        finally:
            close_all([self], deadline_seconds=CLOSE_SECONDS)

    def name(self, number: int) -> str:
        return f"{self.kind} {self.places[number].node}"

    def _start(self, number: int) -> ObjectRef[Address]:
        return self.start_on(number, RolloutWorkerActor.start, self.secret, self._trial, self._described)

    def _metrics(self) -> dict[str, float]:
        return {"rollout/workers_lost": float(self.num_lost)} if self.num_lost else {}

    # -- called in the rollout thread ------------------------------------------------------------------------

    async def start_worker(self, number: int) -> Address:
        if (call := self._starts.pop(number, None)) is None:
            self.make_anew(number)
            call = self._start(number)
        seconds = self._config.launch.start_deadline_seconds
        try:
            return await _within(call, seconds)
        except TimeoutError:
            raise WorkerLost(
                f"{self.names[number]} was not up within launch.start_deadline_seconds = {seconds:g} s"
            ) from None
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            kind = type(cause) if isinstance(cause, MrlError) else WorkerLost
            reason = str(cause) if isinstance(cause, MrlError) else f"did not start: {first_line(cause)}"
            raise kind(f"{self.names[number]}: {reason}") from error

    async def begin(self, number: int, groups: Sequence[GroupStart]) -> None:
        await self._call(number, RolloutWorkerActor.begin, groups)

    async def drop(self, number: int, groups: Sequence[int]) -> None:
        await self._call(number, RolloutWorkerActor.drop, groups)

    async def _call(self, number: int, method: Callable[..., None], groups: Sequence[Any]) -> None:
        try:
            await self.start_on(number, method, groups)
        except Exception as error:
            if is_death(error):
                raise WorkerLost(f"{self.names[number]} is gone") from error
            raise

    async def end_worker(self, number: int, why: str) -> None:
        import ray

        cause = await self._cause(number, why)
        self.num_lost += 1
        if self.num_lost > self._most:
            note = f"; {self._most} rollout workers were replaced before" if self._most else ""
            raise WorkerLost(cause + note)
        log.warning(
            "%s; its groups restart elsewhere; starting a replacement (%d of %d)",
            cause,
            self.num_lost,
            self._most,
        )
        ray.kill(self.actors[number])
        for engine in self.engines[number]:
            await self._wait_until_free(engine)

    async def _wait_until_free(self, engine: int) -> None:
        """Wait until an engine of a lost worker has paused or is lost too."""
        seconds = self._config.rollout.step_deadline_seconds
        try:
            await self._rollout.start_on(engine, RolloutActor.wait_until_free, seconds)
        except Exception as error:
            if is_death(error):
                return  # RolloutGroup.watch finds it
            raise WorkerLost(
                f"{self._rollout.name(engine)} did not pause within rollout.step_deadline_seconds = "
                f"{seconds:g} s after its rollout worker was lost"
            ) from error

    async def _cause(self, number: int, message: str) -> str:
        """Return why a worker was lost; Ray gives the cause of a death to a caller of the actor."""
        import ray

        try:
            await _within(self.start_on(number, lambda actor: None), GRACE_SECONDS)
        except TimeoutError:
            pass
        except Exception as error:
            if is_death(error):
                reason = death_cause(error, self._clock, here=ray.util.get_node_ip_address())
                return f"{self.names[number]} died in phase {self._clock.current}: {reason}"
        return f"{self.names[number]} failed in phase {self._clock.current}: {message}"


async def _within(call: Any, seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await call
