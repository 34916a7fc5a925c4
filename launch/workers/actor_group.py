"""Ray actors of one kind on the slots of a run: made alike, called alike, named alike in errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mrl.config.root import Config
from mrl.launch.cluster.cluster import SLOT
from mrl.launch.workers.waiting import wait_all
from mrl.observe.phases import PhaseClock


class ActorGroup:
    """Actors that are never restarted; number i is `<kind> i`."""

    kind = "worker"

    def __init__(
        self,
        actor_class: type,
        config: Config,
        clock: PhaseClock,
        *,
        strategies: Iterable[Any],
        slot_share: float,
        gpus: float,
        threads: int = 1,
        environment: Mapping[str, str],
        log_folder: str,
    ) -> None:
        """`strategies`: where each actor lives, as Ray's scheduling strategy; `slot_share`, `gpus`: what it reserves of a slot
        and its GPU; `threads`: calls of it that may run at once.
        """
        import ray

        self._config, self._clock = config, clock
        actor: Any = ray.remote(actor_class)
        resources = {SLOT: slot_share} if slot_share else {}
        self.actors = [
            actor.options(
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=threads,
                num_cpus=0,
                num_gpus=gpus,
                resources=resources,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": dict(environment)},
            ).remote(config, number, log_folder)
            for number, strategy in enumerate(strategies)
        ]

    def name(self, number: int) -> str:
        return f"{self.kind} {number}"

    def dead(self) -> list[str]:
        """Names of the actors whose process is gone, as far as this process was told; asks nobody and costs nothing."""
        from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined] generated code

        states = [actor._get_local_state() for actor in self.actors]
        return [self.name(n) for n, state in enumerate(states) if state == ActorTableData.ActorState.DEAD]

    def broadcast(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """The same call on every actor; results by number."""
        return list(self.wait(self.calls("call", method, *arguments, **options)).values())

    def close_calls(self) -> dict[str, Any]:
        return self.calls("close")

    def calls(self, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Starts one call on every actor, by name; to be waited for by the caller."""
        return {
            self.name(number): getattr(actor, method).remote(*arguments, **options)
            for number, actor in enumerate(self.actors)
        }

    def wait(self, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Results of started calls by name, within the phase's deadline."""
        return wait_all(
            calls,
            phase=self._clock.current,
            deadline_seconds=self._config.loop.phase_deadline_seconds,
            clock=self._clock,
        )
