"""Base of all schedules: steps until the end, each with its row, samples, due validation and checkpoint.

A schedule (on_policy.py, stream.py) defines the phases of a step and their order.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mrl.config.root import Config
from mrl.loops import nan_guard, resume_check
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.learn import Learner, TrainerRanks, TrainingStep
from mrl.loops.recorder import Recorder
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.validate import validate
from mrl.observe.ledger_log import InFlightPrompts
from mrl.samples import Group, Prompt


class TrainerAndEngines(Protocol):
    """Trainer and engines, on shared or separate slots."""

    @property
    def train(self) -> TrainerRanks: ...

    def transfer(self, version: int) -> dict[str, float]:
        """Send what the next `sync` to this version needs while the engines generate, if it can be sent."""
        ...

    def sync(self, version: int) -> dict[str, float]: ...

    def end_generation(self) -> None: ...


class Supply(Protocol):
    """Source of a schedule's groups, as checkpoints and ledger lines need it."""

    def take_standing(self) -> InFlightPrompts:
        """Return where the prompts are now; dropped prompts are reported once."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Continue with weights of `version`; return how many groups have later tokens and are redone."""
        ...


class Schedule(abc.ABC):
    """Loop of steps until the configured number, or until `should_stop` returns a reason."""

    def __init__(
        self,
        config: Config,
        engines: TrainerAndEngines,
        rollouts: RolloutThread,
        supply: Supply,
        validation_prompts: Sequence[Prompt],
        recorder: Recorder,
        checkpoints: Checkpoints,
        *,
        should_stop: Callable[[], str | None] = lambda: None,
        throughput: Callable[
            [np.ndarray, Mapping[str, float]], dict[str, float]
        ] = lambda lengths, metrics: {},
    ) -> None:
        self._config, self._engines, self._train = config, engines, engines.train
        self._rollouts, self._validation_prompts, self._source = rollouts, validation_prompts, supply
        self._recorder, self._clock, self._should_stop = recorder, recorder.clock, should_stop
        self._checkpoints, self._throughput = checkpoints, throughput
        self._learner = Learner(config, self._train, self._clock)
        self.on_batch: Callable[[Sequence[Group]], None] = lambda groups: None
        """Called with each step's groups; for measurements."""
        self._row_seconds, self._newer_groups = 0.0, 0
        self._computed = (0.0, 0.0)
        """CPU seconds of the driver's two threads when the step began."""
        self._unwritten: dict[str, float] = {}
        """Row of the step that this run resumes after, if the last process died before it wrote that row."""
        self._resumed: dict[str, float] = {}
        """Additional metrics of the first row after a resume."""
        self.ended = ""
        """Why there are no more steps: "done", or the reason to stop; empty until then."""
        self.next_step = 1
        """Number of the next step; steps count from 1, step 0 is the starting point."""

    @property
    def version(self) -> int:
        """Policy version: the number of finished steps."""
        return self.next_step - 1

    def run(self) -> str:
        """Run all remaining steps after start(); return "done" or the reason to stop."""
        for _ in self.steps():
            pass
        return self.ended

    def steps(self) -> Iterator[int]:
        """Run all remaining steps after start(); yield each one's number once its row is written.

        First comes step 0, the validation of the starting point, or the resumed step if its row is missing.
        The reader may ask to stop until it reads the next number."""
        if (row := self._row_before_steps()) is not None:
            self._write_row(self.version, row)
            yield self.version
        while self.next_step <= self._config.loop.steps:
            self.step()
            yield self.version
            if reason := self._should_stop():
                self._leave_engines()
                with self._clock.phase("save"):
                    self._save_checkpoint({}, goes_on=False)
                self.ended = reason
                return
        self._checkpoints.finish(self._train)
        self.ended = "done"

    def start(self) -> None:
        """Run the first weight sync, after any restore."""
        self._resumed = self._recorder.start(
            self.next_step, self._source.take_standing(), newer_groups=self._newer_groups
        )
        self._engines.sync(self.version)

    @abc.abstractmethod
    def step(self) -> None:
        """Run one step. If a number is NaN or infinite, write the samples down and raise BadNumbers."""

    @abc.abstractmethod
    def _leave_engines(self) -> None:
        """Leave the engines idle, and the trainer ready for a checkpoint."""

    def _row_before_steps(self) -> dict[str, float] | None:
        """Return the row of the version that the run begins with; None if it is written or not wanted."""
        if self.version == 0:
            return self._validate(0) if self._config.loop.validation.before_training else None
        row, self._unwritten = self._unwritten, {}
        if row and self._validation_due(self.version):  # the crash came before the validation
            row = row | self._validate(self.version)
        return row or None

    # -- parts of a step -------------------------------------------------------------------------------------

    def _begin(self) -> TrainingStep:
        self._clock.step = self.next_step
        self._clock.take_waited()
        self._computed = time.thread_time(), self._rollouts.cpu_seconds()
        resumed, self._resumed = self._resumed, {}
        return TrainingStep(self.next_step, self.version, metrics=resumed)

    @contextlib.contextmanager
    def _bad_samples_named(self, step: TrainingStep) -> Iterator[None]:
        """Write down the samples whose numbers end the run."""
        try:
            yield
        except nan_guard.BadNumbers as error:
            self._recorder.bad_samples(step.number, error.groups or step.groups, error)
            raise

    def _commit_pending(self) -> None:
        """Commit the previous step's checkpoint if its files were written while this step generated."""
        if self._checkpoints.pending:
            with self._clock.phase("save"):
                self._checkpoints.poll(self._train)

    def _save(self, step: TrainingStep, *, saves: bool) -> None:
        """Write the ledger's line, the samples, and a checkpoint if `saves`. Comes before the sync, after
        which the trainer's memory may belong to the engines."""
        with self._clock.phase("save"):
            self._recorder.prompts(step.number, step.groups, self._source.take_standing())
            self._recorder.samples(step.number, step.groups, batch=step.batch)
            if saves:
                self._save_checkpoint(step.metrics, goes_on=step.number < self._config.loop.steps)

    def _measure(self, step: TrainingStep) -> None:
        self._measure_time(step)
        if self._validation_due(step.number):
            step.metrics |= self._validate(step.number)

    def _measure_time(self, step: TrainingStep) -> None:
        """Add the seconds of the phases and the step (without saving), the rates, and the driver's own share.

        That share is its main thread's time, with saving and the previous row and without waits for others,
        plus the rollout thread's CPU seconds."""
        metrics, seconds = step.metrics, time.monotonic() - step.started
        metrics |= self._clock.take()
        metrics["time/step_seconds"] = seconds - metrics["time/save_seconds"]
        lengths = step.batch.lengths() if step.batch is not None else np.zeros(0, np.int64)
        metrics |= self._throughput(lengths, metrics)
        computed = time.thread_time(), self._rollouts.cpu_seconds()
        main, rollouts = (now - before for now, before in zip(computed, self._computed, strict=True))
        driver_seconds = seconds + self._row_seconds - self._clock.take_waited() + rollouts
        metrics["perf/driver_seconds"] = driver_seconds
        metrics["perf/driver_frac"] = driver_seconds / (seconds + self._row_seconds)
        metrics["perf/driver_cpu_seconds"] = main + rollouts

    def _write_row(self, number: int, metrics: dict[str, float]) -> None:
        start = time.monotonic()
        self._recorder.row(number, metrics)
        self._checkpoints.poll_exports()
        self._row_seconds = time.monotonic() - start

    # -- what is due -----------------------------------------------------------------------------------------

    def _save_due(self, number: int) -> bool:
        section = self._config.loop.checkpoint
        return self._due(number, section.every_steps, at_end=section.at_end)

    def _validation_due(self, number: int) -> bool:
        section = self._config.loop.validation
        return self._due(number, section.every_steps, at_end=section.after_training)

    def _due(self, number: int, every: int, *, at_end: bool) -> bool:
        return (every > 0 and number % every == 0) or (at_end and number == self._config.loop.steps)

    def _validate(self, number: int) -> dict[str, float]:
        if not self._validation_prompts:
            return {}
        start = time.monotonic()
        self._rollouts.resume(training=False)
        metrics, groups = validate(self._rollouts, self._validation_prompts, self._config)
        self._rollouts.pause()
        self._recorder.samples(number, groups, kind="validation")
        self._clock.take()
        return metrics | {"time/validate_seconds": time.monotonic() - start}

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _save_checkpoint(self, row: Mapping[str, float], *, goes_on: bool) -> None:
        """Save with the step's metrics so far: a crash may prevent its row, written after the weight sync."""
        state = {
            "next_step": self.next_step,
            "settings": resume_check.kept_settings(self._config),
            "supply": self._source.state(),
            "algorithm": self._learner.state(),
            "row": dict(row),
        }
        self._checkpoints.save(self._train, step=self.version, state=state, goes_on=goes_on)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state, and report the settings that changed."""
        if changes := resume_check.changed_settings(state, self._config):
            self._recorder.progress.message(changes)
        self.next_step = int(state["next_step"])
        self._newer_groups = self._source.restore(state["supply"], version=self.version)
        self._learner.restore(state["algorithm"])
        if not self._recorder.has_row(self.version):
            self._unwritten = state.get("row", {})
