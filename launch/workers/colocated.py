"""Hybrid engine: trainer ranks and engines on the same slots, and the weight sync between them.

| stage | trainer | engines |
|---|---|---|
| start: engines | not started | built, weights traced, then asleep |
| start: trainers | built | asleep |
| generate | offloaded | awake, serve version v |
| train | on the slot: forward, update, checkpoint | asleep |
| weight sync | only parameters on the slot; all ranks send | weights awake; receive, verify, commit v + 1 |

The trainer offloads as set by training.offload; engines sleep if the platform supports it. At the start an
engine measures the device's free memory and takes its share, so nothing else may be on the slot; its weight
addresses are traced while the weights are mapped. The reference and a checkpoint are loaded after the start,
while the trainer has the slot to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.errors import WorkerLost
from mrl.launch.workers.actor_group import close_all
from mrl.launch.workers.memory_watch import MemoryWatch
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.step_profiles import StepProfiles
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import Event, PhaseClock
from mrl.resharding.transfer.session import Session

if TYPE_CHECKING:
    from ray import ObjectRef

CLOSE_SECONDS = 20.0


class Hybrid:
    """Trainer ranks and engines on shared slots; `sync` sends the weights to all engines as one version."""

    def __init__(
        self,
        config: Config,
        train: TrainGroup,
        rollout: RolloutGroup,
        clock: PhaseClock,
        *,
        offloads: bool = False,
    ) -> None:
        self._config, self._clock, self._offloads = config, clock, offloads
        self.train, self.rollout = train, rollout
        watch = MemoryWatch(clock, {"trainer": train, "engine": rollout})
        profiles = StepProfiles(config.launch.profile, train, clock)
        self._listeners: list[Callable[[Event], None]] = [self._check_alive, watch, profiles]
        self._digest = ""
        self.version = -1
        """Version that all engines serve; -1 before the first weight sync."""
        self._proved: int | None = None
        """Last version compared with the trainer's parameters, if all sessions since were committed."""

    def start(self) -> None:
        """Build and connect both groups; raise the cause of the first failure."""
        engines = self._start_workers()
        with self._clock.phase("connect"):
            self._digest = self.train.connect(engines)
        self._clock.listeners += self._listeners

    def _start_workers(self) -> list[EngineRank]:
        """Build the engines, then the trainer ranks while the engines sleep."""
        with self._clock.phase("engines"):
            self.rollout.wait_for_start(self.rollout.start())
            engines = self.rollout.engine_ranks()
            self.rollout.sleep()
        with self._clock.phase("trainers"):
            self.train.wait_for_start(self.train.start())
        return engines

    def _check_alive(self, event: Event) -> None:
        """Raise WorkerLost for a dead worker at the end of each phase, even if the phase did not use it."""
        if event == "enter":
            return
        if dead := self.train.dead():
            raise WorkerLost(self.train.death(dead[0]))
        self.rollout.watch()

    def transfer(self, version: int) -> dict[str, float]:
        """Do nothing: engines on the trainer's slots have no memory for weights beside their own."""
        return {}

    def sync(self, version: int) -> dict[str, float]:
        """Sync all engines to `version`, return metrics; raise WeightSyncError if one does not commit."""
        proved, self._proved = self._proved, None  # after a failure the next session is full
        session, start = self._session(version, proved), time.monotonic()
        results = self._hand_over(session)
        self.version, self._proved = version, version if session.full else proved
        return {"sync/seconds": time.monotonic() - start, **stats(results)}

    def _hand_over(self, session: Session) -> list[Any]:
        """Give the slots' memory and a session's weights to the engines; return the trainer's statistics."""
        self._offload(keep_parameters=True)
        self.rollout.wake("weights")
        sends, receives = self._calls(session)
        deadline = 2 * self._config.sync.deadline_seconds
        results = self.train.wait({**sends, **receives}, deadline_seconds=deadline)
        self._offload(keep_parameters=False)
        self.rollout.wake("kv_cache")
        return [results[name] for name in sends]

    def _calls(
        self, session: Session, engines: Collection[int] | None = None
    ) -> tuple[dict[str, ObjectRef[dict[str, float]]], dict[str, ObjectRef[Any]]]:
        """Start a session to all or to these engines; return the trainer ranks' and the engines' calls."""
        absent = [] if engines is None else self.rollout.without(engines)
        return self.train.send(session, absent), self.rollout.receive(session, engines)

    def _session(self, version: int, proved: int | None, *, uneven: bool = False) -> Session:
        """Return a session to `version`, full if due since `proved`; `uneven`: versions may differ."""
        full = self._config.sync.needs_full_verify(proved, version)
        return Session.new(None if uneven else self.version, version, self._digest, full=full)

    def end_generation(self) -> None:
        """End generation until the next weight sync: engines sleep, and the trainer reloads."""
        self.rollout.sleep()
        if self._offloads:
            self.train.reload()

    def _offload(self, *, keep_parameters: bool) -> None:
        if self._offloads:
            self.train.offload(keep_parameters=keep_parameters)

    def close(self) -> None:
        """Close all workers; ignore those that are already gone."""
        self._clock.listeners = [
            listener for listener in self._clock.listeners if listener not in self._listeners
        ]
        close_all((self.rollout, self.rollout.further, self.train), deadline_seconds=CLOSE_SECONDS)


def stats(results: list[Any]) -> dict[str, float]:
    """Return the sums of the ranks' byte counts and the maxima of their seconds."""
    totals: dict[str, float] = {}
    for result in results:
        for name, value in result.items():
            key = f"sync/{name}"
            totals[key] = (
                max(totals.get(key, 0.0), value) if name.endswith("seconds") else totals.get(key, 0.0) + value
            )
    return totals
