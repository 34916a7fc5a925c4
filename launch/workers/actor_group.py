"""Ray actors of one kind: made alike, called by their class's own methods, and named in every error.

Every wait has a deadline, and its error names the first cause: when one rank dies its peers fail a moment
later with broken collectives, so after the first failure the others get a short grace, and a death is
reported before the errors that follow from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from mrl.config.root import Config
from mrl.errors import MrlError, PeerLost, WorkerLost
from mrl.launch.cluster.cluster import SLOT
from mrl.launch.workers.deaths import why
from mrl.observe.phases import PhaseClock

if TYPE_CHECKING:
    from ray import ObjectRef

GRACE_SECONDS = 8.0
"""For what still runs after a first failure: an engine that lost a worker process needs some seconds to
notice and leave."""
POLL_SECONDS = 1.0


class Actor(Protocol):
    """What every actor's class has."""

    def close(self) -> None: ...


A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")


class ActorGroup[A: Actor]:
    """Actors that Ray never restarts; number i is `<kind> i`.

    What an actor shall do is given as a function of it (`TrainActor.send`, or a lambda), so that a checker
    compares arguments and results, and an editor finds the method.
    """

    kind = "worker"

    def __init__(
        self,
        actor_class: type[A],
        config: Config,
        clock: PhaseClock,
        *,
        strategies: Iterable[Any],
        slot_share: float,
        gpus: float,
        threads: int = 1,
        environment: Mapping[str, str],
        own_environments: Sequence[Mapping[str, str]] = (),
        told: Sequence[Any] = (),
        log_folder: str,
    ) -> None:
        """`strategies`: where each actor lives, as Ray's scheduling strategy; `slot_share`, `gpus`: what it
        reserves of a slot and its GPU; `threads`: calls of it that may run at once; `environment`: of all
        processes, `own_environments`: of each beside it; `told`: what each is told of itself, its number where nothing is
        given."""
        import ray

        self._config, self._clock, self._class = config, clock, actor_class
        actor: Any = ray.remote(actor_class)
        resources = {SLOT: slot_share} if slot_share else {}
        strategies = list(strategies)
        environments = [dict(environment) | dict(own) for own in own_environments or [{}] * len(strategies)]
        places = list(zip(strategies, environments, told or range(len(strategies)), strict=True))

        def make(number: int) -> Any:
            strategy, variables, own = places[number]
            return actor.options(
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=threads,
                num_cpus=0,
                num_gpus=gpus,
                resources=resources,
                scheduling_strategy=strategy,
                runtime_env=self.runtime_env(variables),
            ).remote(config, own, log_folder)

        self._make = make
        self._log_folder = Path(log_folder)
        self.actors = [make(number) for number in range(len(places))]

    def runtime_env(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Return how Ray starts the process of an actor with these variables."""
        return {"env_vars": dict(variables)}

    def make_anew(self, number: int) -> None:
        """Ends the process of a number, and makes another one where and as it was."""
        import ray

        ray.kill(self.actors[number])
        self.actors[number] = self._make(number)

    def name(self, number: int) -> str:
        return f"{self.kind} {number}"

    def numbers(self) -> Sequence[int]:
        """The actors that are asked where all are."""
        return range(len(self.actors))

    def dead(self) -> list[int]:
        """The actors whose process is gone, as far as this process was told; asks nobody and costs nothing."""
        from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined] generated code

        gone = ActorTableData.ActorState.DEAD
        return [n for n in self.numbers() if self.actors[n]._get_local_state() == gone]

    def death(self, number: int) -> str:
        """Return what is to be said of an actor that `dead` has named: Ray gives the cause to whoever calls it."""
        import ray
        from ray.exceptions import RayError

        died, reason = f"{self.name(number)} died in phase {self._clock.current}", ""
        try:
            ray.get(self.start_on(number, lambda actor: None), timeout=GRACE_SECONDS)
        except RayError as error:
            if is_death(error):
                reason = f": {why(error, self._clock, here=ray.util.get_node_ip_address())}"
        return died + reason

    def start_on(
        self, number: int, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> ObjectRef[R]:
        """Starts a function of one actor: a method of its class by name, any other pickled, so that it must not hold this
        group. References in `arguments` arrive as values."""
        handle, name = self.actors[number], getattr(function, "__name__", "")
        if getattr(self._class, name, None) is function:
            return getattr(handle, name).remote(*arguments, **options)
        return handle.__ray_call__.remote(function, *arguments, **options)

    def start_on_all(
        self, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> dict[str, ObjectRef[R]]:
        """Starts a function of every actor; the caller waits for the results, by name."""
        return {self.name(n): self.start_on(n, function, *arguments, **options) for n in self.numbers()}

    def on_all(
        self, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> list[R]:
        """Runs a function of every actor and waits for all; results by number."""
        return list(self.wait(self.start_on_all(function, *arguments, **options)).values())

    def wait(
        self, calls: Mapping[str, ObjectRef[R]], *, deadline_seconds: float | None = None
    ) -> dict[str, R]:
        """Results of started calls by name, also of another group's; within the phase's deadline unless
        another is given."""
        deadline_seconds = deadline_seconds or self._config.loop.phase_deadline_seconds
        return wait_all(calls, deadline_seconds=deadline_seconds, clock=self._clock)


def wait_all[R](
    calls: Mapping[str, ObjectRef[R]],
    *,
    deadline_seconds: float,
    clock: PhaseClock,
) -> dict[str, R]:
    """Results of remote calls by worker name ("trainer rank 1", "engine 0"); the clock counts what was spent
    waiting.

    Raises WorkerLost for a death or a missed deadline, else the worker's own error; names worker and phase.
    """
    import ray

    names: dict[Any, str] = {ref: name for name, ref in calls.items()}
    pending, limit = list(names), time.monotonic() + deadline_seconds
    results: dict[str, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        if failed := _take(done, names, results):
            raise_first(failed, pending, names, clock)
        if pending and not _one_ends(pending, limit, clock):
            late = ", ".join(names[r] for r in pending)
            raise WorkerLost(f"{late} did not answer within {deadline_seconds:g} s in phase {clock.current}")
    return {name: results[name] for name in calls}


def _one_ends(pending: Sequence[Any], limit: float, clock: PhaseClock) -> bool:
    """Wait until a call has ended; return False past the limit (monotonic seconds)."""
    import ray

    while time.monotonic() <= limit:
        with clock.waiting():
            ended, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
        if ended:
            return True
    return False


def wait_for_ends[R](
    calls: Mapping[str, ObjectRef[R]],
    *,
    deadline_seconds: float,
    clock: PhaseClock,
    give_up: Callable[[list[str]], None],
) -> tuple[dict[str, R], dict[str, BaseException]]:
    """(results, errors) by name once all calls have ended, however. GRACE_SECONDS after the first error, and at the deadline,
    `give_up` is told which have not; WorkerLost for those that have not after another deadline."""
    import ray

    names: dict[Any, str] = {ref: name for name, ref in calls.items()}
    pending, results, errors = list(names), {}, {}
    given_up, limit = False, time.monotonic() + deadline_seconds
    while pending:
        with clock.waiting():
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.1)
        if found := _take(done, names, results):
            limit = limit if errors else min(limit, time.monotonic() + GRACE_SECONDS)
            errors |= found
        if pending and time.monotonic() > limit:
            late = [names[ref] for ref in pending]
            if given_up:
                raise WorkerLost(
                    f"{', '.join(late)} did not answer within {deadline_seconds:g} s in phase {clock.current}"
                )
            give_up(late)
            given_up, limit = True, time.monotonic() + deadline_seconds
    return results, errors


def close_all(groups: Iterable[ActorGroup[Any]], *, deadline_seconds: float) -> None:
    """Closes the actors of all groups at once, then ends their processes; one that is gone already is not an
    error here."""
    import ray

    groups = list(groups)
    calls = [call for group in groups for call in group.start_on_all(group._class.close).values()]
    ray.wait(calls, num_returns=len(calls), timeout=deadline_seconds)
    for group in groups:
        for actor in group.actors:
            ray.kill(actor)


def _take(done: list[Any], names: Mapping[Any, str], results: dict[str, Any]) -> dict[str, BaseException]:
    """The values of ended calls into `results`, each unpacked once; the errors of those that failed."""
    import ray

    failures = {}
    for ref in done:
        try:
            results[names[ref]] = ray.get(ref, timeout=0)
        except Exception as error:  # sorted by kind in raise_first
            failures[names[ref]] = error
    return failures


def raise_first(
    failed: dict[str, BaseException], pending: list[Any], names: Mapping[Any, str], clock: PhaseClock
) -> None:
    import ray

    phase = clock.current
    deadline = time.monotonic() + GRACE_SECONDS
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        failed |= _take(done, names, {})
    name, error = min(failed.items(), key=lambda item: _severity(item[1]))
    if is_death(error):
        reason = why(error, clock, here=ray.util.get_node_ip_address())
        raise WorkerLost(f"{name} died in phase {phase}: {reason}") from error
    cause = getattr(error, "cause", None)
    if isinstance(cause, PeerLost) and pending:
        late = ", ".join(names[ref] for ref in pending)
        raise WorkerLost(f"{late} kept others waiting in phase {phase}: {first_line(cause)}") from error
    if isinstance(cause, MrlError):
        raise type(cause)(f"{name}, phase {phase}: {cause}") from error
    raise WorkerLost(f"{name} failed in phase {phase}: {first_line(cause or error)}\n{error}") from error


def is_death(error: BaseException) -> bool:
    """Whether a call failed because its process is gone."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    return isinstance(error, RayActorError | OutOfMemoryError)


def is_lost(error: BaseException) -> bool:
    """Whether the process of a call that failed is gone, or failed in a way that says nothing of whether it can go on."""
    return _severity(error) in (0, 2)


def _severity(error: BaseException) -> int:
    """0: a process died; 1: our own typed error; 2: anything else (often a consequence); 3: by its own word a
    consequence."""
    if is_death(error):
        return 0
    cause = getattr(error, "cause", None)
    if isinstance(cause, PeerLost):
        return 3
    return 1 if isinstance(cause, MrlError) else 2


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
