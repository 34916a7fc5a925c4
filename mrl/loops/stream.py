"""The stream schedule: generation runs ahead of training by at most a proven number of versions (mrl/pool/ledger.py).

| phase | consumes | produces | done by |
|---|---|---|---|
| generate | prompts of the stream, parked responses | the next groups in order | Producer, pumped |
| park (shared slots) | unfinished responses | free engines, which rest | Producer, Hybrid |
| recompute, estimate, update | groups | weights v + 1, metrics | Learner; engines with slots of their own go on, pumped |
| park (own slots) | unfinished responses | a consistent cut: weights v + 1, tokens of versions up to v | Producer |
| save | groups, state of the cut | samples, checkpoint where one is due | Books |
| sync | weights v + 1 | engines at version v + 1, slots of the trained groups | Hybrid, Producer |

After the sync a validation that is due runs on exactly one version, while the unfinished responses stay parked; then they go
on. With stream.sync_every above 1 steps follow each other without park and sync while the next groups are there.

Every wait inside has a deadline, which names the oldest group; so does the loss of a worker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from mrl.config.root import Config
from mrl.errors import RolloutError, WorkerLost
from mrl.loops.collect import Collector
from mrl.loops.learn import TrainingStep
from mrl.loops.produce import Producer
from mrl.loops.schedule import Schedule, TrainerAndEngines


class StreamLoop(Schedule):
    """The engines generate whenever weights and slots allow; a step takes the next groups in order."""

    def __init__(
        self,
        config: Config,
        engines: TrainerAndEngines,
        collector: Collector,
        producer: Producer,
        *rest: Any,
        **more: Any,
    ) -> None:
        """The further arguments are a Schedule's."""
        super().__init__(config, engines, collector, producer, *rest, **more)
        self._producer, self._steps_since_sync = producer, 0

    @property
    def _shares_slots(self) -> bool:
        return not self._config.launch.engine_slots

    def start(self) -> None:
        super().start()
        self._producer.commit(self.version)

    def step(self) -> None:
        step = self._begin()
        with self._oldest_named():
            self._step(step)

    @contextlib.contextmanager
    def _oldest_named(self) -> Iterator[None]:
        """A worker that is lost, or late, ends the run with the oldest group, where it was and what it lacks."""
        try:
            yield
        except WorkerLost as error:
            raise WorkerLost(f"{error}; {self._producer.waiting_for()}") from error

    def _step(self, step: TrainingStep) -> None:
        with self._bad_samples_named(step):
            self._take(step)
            self._commit_pending()
            self._learn(step)
        self.next_step += 1
        self._steps_since_sync += 1
        syncs = self._sync_due(step.number)
        if syncs:
            self._park()
        self._save(step)
        if syncs:
            self._sync(step)
        self._measure(step)
        if step.number < self._config.loop.steps:
            self._go_on()
        self._write_row(step.number, step.metrics)

    def _take(self, step: TrainingStep) -> None:
        """Phase generate: pumps until the next groups are there, in order."""
        self._go_on()
        start, limit = time.monotonic(), self._config.loop.phase_deadline_seconds
        step.metrics["stream/waited"] = 0.0
        with self._clock.phase("generate"):
            while (batch := self._producer.take(step.version)) is None:
                if time.monotonic() - start > limit:
                    raise RolloutError(
                        f"the next groups are not there after loop.phase_deadline_seconds = {limit:g} s in phase generate: "
                        f"{self._producer.waiting_for()}"
                    )
                step.metrics["stream/waited"] = 1.0
                self._producer.pump(1.0)
                if self._steps_since_sync and self._producer.stranded:
                    self._sync_early(step)
        step.groups, step.served_version = batch.groups, batch.served_version
        step.metrics |= batch.metrics | {"stream/wait_for_groups_seconds": time.monotonic() - start}
        self.on_batch(step.groups)

    def _sync_early(self, step: TrainingStep) -> None:
        """Sync the weights inside phase generate, which brings in the engines that are started again after every engine was
        lost since the last weight sync."""
        self._producer.pause()
        step.metrics |= self._engines.sync(self.version)
        self._producer.commit(self.version)
        self._steps_since_sync = 0
        self._producer.resume()

    def _learn(self, step: TrainingStep) -> None:
        """The engines rest where they share the trainer's slots, and go on where they have their own."""
        if self._shares_slots:
            self._leave_engines()
            self._learner.learn(step)
        else:
            with self._train.meanwhile(self._producer.pump):
                self._learner.learn(step)

    def _sync_due(self, number: int) -> bool:
        """By stream.sync_every; earlier for a cut or a validation, and where the engines must go on for the next groups."""
        due = self._producer.sync_due(shared=self._shares_slots) or number == self._config.loop.steps
        return due or self._save_due(number) or self._validation_due(number)

    def _sync(self, step: TrainingStep) -> None:
        with self._clock.phase("sync"):
            step.metrics |= self._engines.sync(self.version)
        self._producer.commit(self.version)
        self._steps_since_sync = 0

    def _go_on(self) -> None:
        """The engines work again where they have the newest weights they are to have, and the slots."""
        if self._steps_since_sync == 0:
            self._producer.resume()

    def _park(self) -> None:
        with self._clock.phase("park"):
            self._producer.pause()

    def _leave_engines(self) -> None:
        self._park()
        if self._steps_since_sync == 0:  # else they rest since the step before
            self._engines.rest()
