"""Stream schedule: generation runs ahead of training by at most a proven bound (mrl/pool/ledger.py).

| phase | consumes | produces | done by |
|---|---|---|---|
| generate | prompts of the stream, partial rollouts | the next groups in order | RolloutThread |
| pause (shared slots) | partial rollouts | paused engines | RolloutThread, Hybrid |
| recompute, estimate, update | groups | weights v + 1, metrics | Learner; own-slot engines continue |
| transfer (own slots) | weights v + 1 | engines that have them, and generate with v | TwoPools |
| pause (own slots) | partial rollouts | a consistent cut: weights v + 1, tokens up to v | RolloutThread |
| save | groups, state of the cut | samples, checkpoint if one is due | Recorder, Checkpoints |
| sync | weights v + 1 | engines at version v + 1, places of the trained groups | Hybrid, RolloutThread |

Phase pause stops the engines. After the sync a due validation runs on exactly one version; then the partial
rollouts resume. With stream.sync_every above 1, steps follow each other without pause and sync while the next
groups are ready.

Every wait has a deadline. Its error, and that of a lost worker, names the oldest group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from mrl.config.root import Config
from mrl.errors import RolloutError, WorkerLost
from mrl.loops.event_thread import CHECK_SECONDS
from mrl.loops.learn import TrainingStep
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.schedule import Schedule, TrainerAndEngines

COUNTS: tuple[str, ...] = ("stream/interrupted", "stream/pause_seconds", "stream/reprefill_tokens")
"""Summed from one step's groups to the next."""


class StreamLoop(Schedule):
    """Stream loop: engines generate if weights and slots allow; a step takes the next groups in order."""

    def __init__(
        self, config: Config, engines: TrainerAndEngines, rollouts: RolloutThread, *args: Any, **kwargs: Any
    ) -> None:
        """`rollouts` has a buffer; the remaining arguments are those of Schedule."""
        super().__init__(config, engines, rollouts, rollouts, *args, **kwargs)
        self._steps_since_sync = 0
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._stopped = 0.0
        """Time at which engines on their own slots stopped for a weight sync."""

    @property
    def _shares_slots(self) -> bool:
        return not self._config.launch.engine_slots

    def start(self) -> None:
        super().start()
        self._rollouts.commit(self.version)

    def step(self) -> None:
        step = self._begin()
        with self._oldest_named():
            self._step(step)

    @contextlib.contextmanager
    def _oldest_named(self) -> Iterator[None]:
        """Add to the error of a lost or late worker the oldest group, where it is and what it lacks."""
        try:
            yield
        except WorkerLost as error:
            raise WorkerLost(f"{error}; {self._rollouts.waiting_for()}") from error

    def _step(self, step: TrainingStep) -> None:
        saves = self._save_due(step.number)
        with self._bad_samples_named(step):
            self._take(step)
            self._commit_pending()
            self._learn(step, saves=saves)
        self.next_step += 1
        self._steps_since_sync += 1
        syncs = saves or self._sync_due(step.number)
        if syncs:
            self._transfer(step)
            self._park(saves=saves)
        self._save(step, saves=saves)
        if syncs:
            self._sync(step)
        self._measure(step)
        if step.number < self._config.loop.steps:
            self._resume()
        self._write_row(step.number, step.metrics)

    def _take(self, step: TrainingStep) -> None:
        self._resume()
        start, limit = time.monotonic(), self._config.loop.phase_deadline_seconds
        step.metrics["stream/waited"] = 0.0
        with self._clock.phase("generate"):
            while (batch := self._rollouts.take(step.version, min(CHECK_SECONDS, limit))) is None:
                if time.monotonic() - start > limit:
                    raise RolloutError(
                        f"the next groups are not ready after loop.phase_deadline_seconds = {limit:g} s in "
                        f"phase generate: {self._rollouts.waiting_for()}"
                    )
                step.metrics["stream/waited"] = 1.0
                if self._steps_since_sync and self._rollouts.is_stranded:
                    self._sync_early(step)
        step.groups, step.served_version = batch.groups, batch.served_version
        step.metrics |= batch.metrics | {"stream/wait_for_groups_seconds": time.monotonic() - start}
        step.metrics |= self._counts
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.on_batch(step.groups)

    def _sync_early(self, step: TrainingStep) -> None:
        """Sync inside phase generate, to bring in restarted engines: all were lost since the last sync."""
        self._pause(snapshot=False)
        step.metrics |= self._engines.sync(self.version)
        self._rollouts.commit(self.version)
        self._steps_since_sync = 0
        self._resume()

    def _learn(self, step: TrainingStep, *, saves: bool) -> None:
        """Learn; engines on the trainer's slots pause meanwhile, engines on their own slots continue."""
        if self._shares_slots:
            self._rest(saves=saves)
        self._learner.learn(step)

    def _sync_due(self, number: int) -> bool:
        """Return True if a sync is due: by stream.sync_every, for a validation or for the next groups."""
        due = self._rollouts.sync_due(shared=self._shares_slots) or number == self._config.loop.steps
        return due or self._validation_due(number)

    def _transfer(self, step: TrainingStep) -> None:
        """Let engines on their own slots take the new weights while they generate, if sync.overlap."""
        if not self._shares_slots:
            with self._clock.phase("transfer"):
                step.metrics |= self._engines.transfer(self.version)
        self._stopped = time.monotonic()

    def _sync(self, step: TrainingStep) -> None:
        with self._clock.phase("sync"):
            step.metrics |= self._engines.sync(self.version)
        self._rollouts.commit(self.version)
        self._steps_since_sync = 0
        if not self._shares_slots:
            step.metrics["stream/stopped_seconds"] = time.monotonic() - self._stopped

    def _resume(self) -> None:
        """Resume the engines if no step has ended since the last weight sync."""
        if self._steps_since_sync == 0:
            start = time.monotonic()
            self._rollouts.resume()
            self._counts["stream/pause_seconds"] += time.monotonic() - start

    def _park(self, *, saves: bool) -> None:
        with self._clock.phase("pause"):
            self._pause(snapshot=saves or self._config.rollout.max_replacements > 0)

    def _pause(self, *, snapshot: bool) -> None:
        start = time.monotonic()
        interrupted = self._rollouts.pause(snapshot=snapshot)
        self._counts["stream/interrupted"] += interrupted.num_requests
        self._counts["stream/reprefill_tokens"] += interrupted.num_tokens
        self._counts["stream/pause_seconds"] += time.monotonic() - start

    def _leave_engines(self) -> None:
        self._rest(saves=True)

    def _rest(self, *, saves: bool) -> None:
        self._park(saves=saves)
        if self._steps_since_sync == 0:  # otherwise they are idle since an earlier step
            self._engines.end_generation()
