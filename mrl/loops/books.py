"""What a run leaves behind, under every schedule: rows, samples, validations and checkpoints, each where it is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mrl.config.root import Config
from mrl.loops import nan_guard
from mrl.loops.checkpoints import Checkpoints, Saver
from mrl.loops.collect import Collector
from mrl.loops.learn import Step
from mrl.loops.recorder import Recorder
from mrl.loops.validate import validate
from mrl.samples import Prompt

Throughput = Callable[[np.ndarray, Mapping[str, float]], dict[str, float]]
"""From the lengths of a step's samples and its metrics to rates."""


class Loop(Protocol):
    """A schedule, as `Books.run` drives it."""

    next_step: int
    """Number of the next step; steps count from 1, step 0 is the starting point."""

    def step(self) -> None: ...

    def stop(self) -> None:
        """Saves, because the run ends before its last step."""
        ...


class Books:
    """Keeps them for one run."""

    def __init__(
        self,
        config: Config,
        train: Saver,
        collector: Collector,
        validation_prompts: Sequence[Prompt],
        recorder: Recorder,
        checkpoints: Checkpoints,
        *,
        throughput: Throughput = lambda lengths, metrics: {},
    ) -> None:
        self._config, self._train, self._collector = config, train, collector
        self._validation_prompts, self._recorder = validation_prompts, recorder
        self._checkpoints, self._throughput = checkpoints, throughput
        self.clock = recorder.clock
        self._row_seconds = 0.0

    def run(self, loop: Loop, should_stop: Callable[[], str | None]) -> str:
        """All remaining steps, the starting point's validation before the first; returns why it ended ("done" or the
        reason to stop)."""
        if loop.next_step == 1 and self._config.loop.validation.before_training:
            self.row(0, self.validate(0))
        while loop.next_step <= self._config.loop.steps:
            loop.step()
            if reason := should_stop():
                loop.stop()
                return reason
        self._checkpoints.finish(self._train)
        return "done"

    # -- what is due ---------------------------------------------------------------------------------------------

    def saves(self, number: int) -> bool:
        """Whether a checkpoint is due after this step."""
        section = self._config.loop.checkpoint
        return self._due(number, section.every_steps, at_end=section.at_end)

    def validates(self, number: int) -> bool:
        """Whether a validation is due after this step."""
        section = self._config.loop.validation
        return self._due(number, section.every_steps, at_end=section.after_training)

    def _due(self, number: int, every: int, *, at_end: bool) -> bool:
        return (every > 0 and number % every == 0) or (at_end and number == self._config.loop.steps)

    # -- entries -------------------------------------------------------------------------------------------------

    def begin(self, number: int, version: int) -> Step:
        """A step that trains `version`."""
        step = Step(number, version)
        self.clock.step = number
        self.clock.take_waited()
        return step

    def commit_pending(self) -> None:
        """The checkpoint of the step before, if it is written beside this one; generating left time for its files."""
        if self._checkpoints.pending:
            with self.clock.phase("save"):
                self._checkpoints.poll(self._train)

    def samples(self, step: Step) -> None:
        self._recorder.samples(step.number, step.groups)

    def save(self, step: int, state: Mapping[str, Any], *, goes_on: bool) -> None:
        """The checkpoint of a step."""
        self._checkpoints.save(self._train, step=step, state=state, goes_on=goes_on)

    def bad_numbers(self, step: Step, error: nan_guard.BadNumbers) -> None:
        """Writes the samples down whose numbers end the run."""
        self._recorder.bad_samples(step.number, error.groups or step.groups, error)

    def validate(self, number: int) -> dict[str, float]:
        if not self._validation_prompts:
            return {}
        start = time.monotonic()
        metrics, groups = validate(self._collector, self._validation_prompts, self._config)
        self._recorder.samples(number, groups, kind="validation")
        self.clock.take()
        return metrics | {"time/validate_seconds": time.monotonic() - start}

    def close(self, step: Step) -> None:
        """Ends a step: its times, the validation that is due, its row."""
        self._measure_time(step)
        if self.validates(step.number):
            step.metrics |= self.validate(step.number)
        self.row(step.number, step.metrics)

    def _measure_time(self, step: Step) -> None:
        """Seconds of the phases and of the step, without saving; rates; and what the driver's thread did itself: a step,
        saving and the row before it included, less the waits for others."""
        metrics, seconds = step.metrics, time.monotonic() - step.started
        metrics |= self.clock.take()
        metrics["time/step_seconds"] = seconds - metrics["time/save_seconds"]
        lengths = step.batch.lengths() if step.batch is not None else np.zeros(0, np.int64)
        metrics |= self._throughput(lengths, metrics)
        own = seconds + self._row_seconds - self.clock.take_waited()
        metrics["perf/driver_seconds"] = own
        metrics["perf/driver_frac"] = own / (seconds + self._row_seconds)
        metrics["perf/driver_cpu_seconds"] = time.thread_time() - step.worked

    def row(self, number: int, metrics: dict[str, float]) -> None:
        start = time.monotonic()
        self._recorder.row(number, metrics)
        self._checkpoints.export_due()
        self._row_seconds = time.monotonic() - start

    def restore_row(self, step: int, row: Mapping[str, float]) -> None:
        """The row of a saved step whose run died before it wrote that."""
        self._recorder.restore_row(step, row)
