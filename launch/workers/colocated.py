"""The hybrid engine: trainer ranks and engines on the same slots, and the weight sync between them.

| stage | trainer | engines |
|---|---|---|
| start: engines | nothing on the slot yet | built, weights traced, then asleep |
| start: trainers | built | asleep |
| generate | all of it off-loaded | awake, serve version v |
| train | on the slot: forward, update, checkpoint | asleep |
| weight sync | only parameters on the slot; every rank sends | weights awake; every engine receives, verifies, commits v + 1 |

The trainer off-loads by training.offload; engines sleep where the platform can. At the start an engine
measures the device's free memory and takes its share of it, so that nobody else may be on the slot; where its
weights lie is traced while they are mapped. A reference and a checkpoint are loaded after the start, by a
trainer that has the slot to itself.
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
    """Both groups; `sync` moves the trainer's weights into every engine as one version."""

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
        """The version all engines serve; -1 before the first weight sync."""
        self._proved: int | None = None
        """The last version that was compared with the trainer's own parameters, in sessions that all
        committed since."""

    def start(self) -> None:
        """Builds and connects both groups; the first failure ends the start with its cause."""
        engines = self._start_workers()
        with self._clock.phase("connect"):
            self._digest = self.train.connect(engines)
        self._clock.listeners += self._listeners

    def _start_workers(self) -> list[EngineRank]:
        """Builds the engines, then the trainer ranks on the slots that sleeping engines left."""
        deadline = self._config.launch.start_deadline_seconds
        with self._clock.phase("engines"):
            calls = self.rollout.start()
            self.rollout.wait(calls, deadline_seconds=deadline)
            engines = self.rollout.engine_ranks()
            self.rollout.sleep()
        with self._clock.phase("trainers"):
            self.train.wait(self.train.start(), deadline_seconds=deadline)
        return engines

    def _check_alive(self, event: Event) -> None:
        """WorkerLost for a death in a phase that asks nothing of the dead, instead of finding it when it is
        next needed."""
        if event == "enter":
            return
        if dead := self.train.dead():
            raise WorkerLost(self.train.death(dead[0]))
        self.rollout.watch()

    def sync(self, version: int) -> dict[str, float]:
        """One weight sync to `version`; all engines commit it or the call raises WeightSyncError. Returns its
        metrics."""
        proved, self._proved = self._proved, None  # what fails is followed by a full session
        session, start = self._session(version, proved), time.monotonic()
        results = self._hand_over(session)
        self.version, self._proved = version, version if session.full else proved
        return {"sync/seconds": time.monotonic() - start, **stats(results)}

    def _hand_over(self, session: Session) -> list[Any]:
        """Give the trainer's slots to the engines on them, with the weights of a session; what the trainer ranks report of it."""
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
        """A session to all engines, or to these, started on both sides: the trainer ranks' calls and the engines'."""
        absent = [] if engines is None else self.rollout.without(engines)
        return self.train.send(session, absent), self.rollout.receive(session, engines)

    def _session(self, version: int, proved: int | None, *, uneven: bool = False) -> Session:
        """To `version`; full where `sync` wants it after the version that was `proved` last. `uneven`: engines may have
        different versions."""
        full = self._config.sync.full_after(proved, version)
        return Session.new(None if uneven else self.version, version, self._digest, full=full)

    def rest(self) -> None:
        """Generation is over until the next weight sync: the engines give their memory to training, which
        comes back."""
        self.rollout.sleep()
        if self._offloads:
            self.train.reload()

    def _offload(self, *, keep_parameters: bool) -> None:
        if self._offloads:
            self.train.offload(keep_parameters=keep_parameters)

    def close(self) -> None:
        """Closes all workers; one that is gone already is not an error here."""
        self._clock.listeners = [each for each in self._clock.listeners if each not in self._listeners]
        close_all((self.rollout, self.rollout.further, self.train), deadline_seconds=CLOSE_SECONDS)


def stats(results: list[Any]) -> dict[str, float]:
    """Sums of the ranks' byte counts, maxima of their seconds."""
    totals: dict[str, float] = {}
    for result in results:
        for name, value in result.items():
            key = f"sync/{name}"
            totals[key] = (
                max(totals.get(key, 0.0), value) if name.endswith("seconds") else totals.get(key, 0.0) + value
            )
    return totals
