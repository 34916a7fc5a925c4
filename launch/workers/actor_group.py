"""Groups of Ray actors of one kind, called by methods of their class and named in every error.

Every wait has a deadline, and its error names the first cause. If a rank dies, its peers soon fail with
broken collectives. So after a first failure the others get a short grace period, and a death is reported
before its consequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from mrl.config.root import Config
from mrl.errors import MrlError, PeerLost, WorkerLost
from mrl.launch.cluster.cluster import SLOT
from mrl.launch.workers import compile_watch
from mrl.launch.workers.deaths import death_cause
from mrl.observe.phases import PhaseClock

if TYPE_CHECKING:
    from ray import ObjectRef

GRACE_SECONDS = 8.0
"""Grace period after a failure: an engine that lost a process needs seconds to notice and exit."""
POLL_SECONDS = 1.0


class Actor(Protocol):
    """Interface of every actor class."""

    def close(self) -> None: ...


A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")


class ActorGroup[A: Actor]:
    """Actors that Ray never restarts; number i is named `<kind> i`.

    Calls are passed as unbound methods (`TrainActor.send`) or lambdas, so that a type checker sees arguments
    and results, and an editor finds the method.
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
        facts: Sequence[Any] = (),
        log_folder: str,
    ) -> None:
        """Start the actors.

        Args:
            strategies: Ray scheduling strategy of each actor.
            slot_share: Share of a slot that each reserves.
            gpus: Share of a GPU that each reserves.
            threads: Concurrent calls of an actor.
            environment: Variables of all processes.
            own_environments: More variables of each process.
            facts: Argument of each actor about itself; by default its number.
        """
        import ray

        self._config, self._clock, self._class = config, clock, actor_class
        actor: Any = ray.remote(actor_class)
        resources = {SLOT: slot_share} if slot_share else {}
        strategies = list(strategies)
        environments = [
            dict(environment) | dict(extra) for extra in own_environments or [{}] * len(strategies)
        ]
        places = list(zip(strategies, environments, facts or range(len(strategies)), strict=True))

        def make(number: int) -> Any:
            strategy, variables, extra = places[number]
            return actor.options(
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=threads,
                num_cpus=0,
                num_gpus=gpus,
                resources=resources,
                scheduling_strategy=strategy,
                runtime_env=self.runtime_env(variables),
            ).remote(config, extra, log_folder)

        self._make = make
        self._log_folder = Path(log_folder)
        self.actors = [make(number) for number in range(len(places))]

    def runtime_env(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Return Ray's runtime environment of an actor with these variables."""
        return {"env_vars": dict(variables)}

    def make_anew(self, number: int) -> None:
        """Kill an actor's process and start another in the same place."""
        import ray

        ray.kill(self.actors[number])
        self.actors[number] = self._make(number)

    def name(self, number: int) -> str:
        return f"{self.kind} {number}"

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the actors that calls to all go to."""
        return range(len(self.actors))

    def dead(self) -> list[int]:
        """Return the actors known to be dead, from this process's local state, without a remote call."""
        from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined] generated code

        gone = ActorTableData.ActorState.DEAD
        return [n for n in self.numbers() if self.actors[n]._get_local_state() == gone]

    def death(self, number: int) -> str:
        """Return a message about an actor from `dead`, with the cause, which Ray gives to its caller."""
        import ray
        from ray.exceptions import RayError

        died, reason = f"{self.name(number)} died in phase {self._clock.current}", ""
        try:
            ray.get(self.start_on(number, lambda actor: None), timeout=GRACE_SECONDS)
        except RayError as error:
            if is_death(error):
                reason = f": {death_cause(error, self._clock, here=ray.util.get_node_ip_address())}"
        return died + reason

    def start_on(
        self, number: int, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> ObjectRef[R]:
        """Start a function on one actor: a method of its class is called by name, any other function is
        pickled, so it must not refer to this group. References in `arguments` arrive as values."""
        handle, name = self.actors[number], getattr(function, "__name__", "")
        if getattr(self._class, name, None) is function:
            return getattr(handle, name).remote(*arguments, **options)
        return handle.__ray_call__.remote(function, *arguments, **options)

    def start_on_all(
        self, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> dict[str, ObjectRef[R]]:
        """Start a function on every actor; return its results' references by actor name."""
        return {self.name(n): self.start_on(n, function, *arguments, **options) for n in self.numbers()}

    def on_all(
        self, function: Callable[Concatenate[A, P], R], *arguments: P.args, **options: P.kwargs
    ) -> list[R]:
        """Run a function on every actor and wait for all; return the results by number."""
        return list(self.wait(self.start_on_all(function, *arguments, **options)).values())

    def wait(
        self, calls: Mapping[str, ObjectRef[R]], *, deadline_seconds: float | None = None
    ) -> dict[str, R]:
        """Wait for calls, also another group's; return results by name. Default: the phase's deadline."""
        deadline_seconds = deadline_seconds or self._config.loop.phase_deadline_seconds
        return wait_all(calls, deadline_seconds=deadline_seconds, clock=self._clock)

    def wait_for_start(self, calls: Mapping[str, ObjectRef[R]]) -> dict[str, R]:
        """Wait for workers that start; launch.start_deadline_seconds begins anew while they compile."""
        return wait_all(
            calls,
            deadline_seconds=self._config.launch.start_deadline_seconds,
            clock=self._clock,
            progress=lambda: compile_watch.reports(self._log_folder),
        )


def wait_all[R](
    calls: Mapping[str, ObjectRef[R]],
    *,
    deadline_seconds: float,
    clock: PhaseClock,
    progress: Callable[[], Mapping[str, object]] = dict,
) -> dict[str, R]:
    """Return the results of remote calls by worker name ("trainer rank 1"); the clock counts the waiting
    time. The deadline begins anew if `progress` returns a new entry or another value of one.

    Raises WorkerLost for a death or a missed deadline, else the worker's error; names worker and phase.
    """
    import ray

    names: dict[Any, str] = {ref: name for name, ref in calls.items()}
    pending = list(names)
    limit = _Limit(deadline_seconds, progress)
    results: dict[str, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        if failed := _take(done, names, results):
            raise_first(failed, pending, names, clock)
        if pending and not _one_ends(pending, limit, clock):
            late = ", ".join(names[r] for r in pending)
            raise WorkerLost(f"{late} did not respond within {deadline_seconds:g} s in phase {clock.current}")
    return {name: results[name] for name in calls}


class _Limit:
    """End of a wait; begins anew if there was progress, which is read only once it is over."""

    def __init__(self, seconds: float, progress: Callable[[], Mapping[str, object]]) -> None:
        self._seconds, self._progress = seconds, progress
        self._seen, self._at = progress(), time.monotonic() + seconds

    def is_over(self) -> bool:
        if time.monotonic() <= self._at:
            return False
        before, self._seen = self._seen, self._progress()
        if self._seen.items() <= before.items():
            return True
        self._at = time.monotonic() + self._seconds
        return False


def _one_ends(pending: Sequence[Any], limit: _Limit, clock: PhaseClock) -> bool:
    """Wait until a call has ended; return False after the limit."""
    import ray

    while not limit.is_over():
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
    """Wait until all calls have ended; return (results, errors) by name. GRACE_SECONDS after the first error,
    or at the deadline, `give_up` gets the pending names; after another deadline raise WorkerLost."""
    import ray

    names: dict[Any, str] = {ref: name for name, ref in calls.items()}
    pending, results, errors = list(names), {}, {}
    given_up, limit = False, time.monotonic() + deadline_seconds
    while pending:
        with clock.waiting():
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.1)
        if failures := _take(done, names, results):
            limit = limit if errors else min(limit, time.monotonic() + GRACE_SECONDS)
            errors |= failures
        if pending and time.monotonic() > limit:
            late = [names[ref] for ref in pending]
            if given_up:
                raise WorkerLost(
                    f"{', '.join(late)} did not respond within {deadline_seconds:g} s in phase "
                    f"{clock.current}"
                )
            give_up(late)
            given_up, limit = True, time.monotonic() + deadline_seconds
    return results, errors


def close_all(groups: Iterable[ActorGroup[Any]], *, deadline_seconds: float) -> None:
    """Close the actors of all groups at once, then kill their processes; ignore dead ones."""
    import ray

    groups = list(groups)
    calls = [call for group in groups for call in group.start_on_all(group._class.close).values()]
    ray.wait(calls, num_returns=len(calls), timeout=deadline_seconds)
    for group in groups:
        for actor in group.actors:
            ray.kill(actor)


def _take(done: list[Any], names: Mapping[Any, str], results: dict[str, Any]) -> dict[str, BaseException]:
    """Put the values of ended calls into `results`; return the errors of failed calls by name."""
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
        reason = death_cause(error, clock, here=ray.util.get_node_ip_address())
        raise WorkerLost(f"{name} died in phase {phase}: {reason}") from error
    cause = getattr(error, "cause", None)
    if isinstance(cause, PeerLost) and pending:
        late = ", ".join(names[ref] for ref in pending)
        raise WorkerLost(f"{late} kept others waiting in phase {phase}: {first_line(cause)}") from error
    if isinstance(cause, MrlError):
        raise type(cause)(f"{name}, phase {phase}: {cause}") from error
    raise WorkerLost(f"{name} failed in phase {phase}: {first_line(cause or error)}\n{error}") from error


def is_death(error: BaseException) -> bool:
    """Return True if a call failed because its process is gone."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    return isinstance(error, RayActorError | OutOfMemoryError)


def is_lost(error: BaseException) -> bool:
    """Return True if a failed call's process is gone, or may be unusable after an untyped error."""
    return _severity(error) in (0, 2)


def _severity(error: BaseException) -> int:
    """Return 0: death, 1: typed error, 2: other (often a consequence), 3: PeerLost (always one)."""
    if is_death(error):
        return 0
    cause = getattr(error, "cause", None)
    if isinstance(cause, PeerLost):
        return 3
    return 1 if isinstance(cause, MrlError) else 2


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
