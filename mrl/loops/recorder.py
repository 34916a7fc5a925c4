"""Phase save, the writing half: metrics rows, samples, trackers, progress and checkpoints of one run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from mrl.config.root import Config
from mrl.config.sections.export import ExportSection
from mrl.errors import CheckpointError
from mrl.loops.exports import Exports
from mrl.loops.nan_guard import BadNumbers
from mrl.observe import metrics_log, trackers
from mrl.observe.metrics_log import LAYERS, MetricsLog
from mrl.observe.phases import PhaseClock
from mrl.observe.progress import Progress
from mrl.observe.run_folder import RunFolder
from mrl.observe.samples_log import SamplesLog, write_named
from mrl.observe.tracked_run import TrackedRun
from mrl.samples import Group
from mrl.training.checkpoint import folder as checkpoint_folder

log = logging.getLogger(__name__)


class Recorder:
    """Everything a run writes. A failing tracker or a full disk never loses a step of training."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        clock: PhaseClock,
        *,
        first_step: int,
        exports: Exports | None = None,
    ) -> None:
        self._config, self._folder, self.clock = config, folder, clock
        self._exports = exports or Exports(ExportSection(), folder.path, run_name=config.run.name)
        self._metrics = MetricsLog(folder.metrics)
        self._layers = MetricsLog(folder.expert_load)
        for rows in (self._metrics, self._layers):
            rows.resume_at(first_step)
        self._samples = SamplesLog(folder.samples, limit=config.logging.samples_per_step)
        run = TrackedRun(folder.path, config.run.name, config.model_dump(mode="json"), first_step)
        self._trackers = trackers.start(config.logging, run, history=metrics_log.read(folder.metrics))
        self.progress = Progress(config.loop.steps)
        self.last_row: dict[str, float] = {}
        self._failed_saves = 0

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """One object of metrics.jsonl; what is of single layers goes to expert_load.jsonl."""
        row = {**metrics, "mem/driver_bytes": float(psutil.Process().memory_info().rss)}
        row = self._write(step, row)
        self.progress.step(step, row)
        self.last_row = row
        self._exports.poll()  # after the row, which the folder's model card tells

    def restore_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """The row of a saved step whose run died before it wrote that."""
        if metrics and not self._metrics.has(step):
            self._write(step, metrics)

    def _write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Writes a row wherever rows go; returns what metrics.jsonl takes of it."""
        row = {name: value for name, value in metrics.items() if not name.startswith(LAYERS)}
        self._metrics.write(step, row)
        if layers := {name: value for name, value in metrics.items() if name not in row}:
            self._layers.write(step, layers)
        for tracker in self._trackers:
            tracker.log(step, row)
        return row

    def samples(self, step: int, groups: Sequence[Group], *, kind: str = "train") -> None:
        self._samples.write(step, groups, kind=kind)

    def bad_samples(self, step: int, groups: Sequence[Group], error: BadNumbers) -> None:
        """bad_samples.jsonl: the samples whose numbers ended the run."""
        path = self._folder.path / "bad_samples.jsonl"
        write_named(path, step, groups, error.sample_ids, reason=str(error))
        self.progress.message(f"{len(error.sample_ids)} sample(s) with bad numbers written to {path}")

    def checkpoint(self, train: Any, *, step: int, state: Mapping[str, Any]) -> None:
        """A committed checkpoint; a save that fails is loud and leaves the previous one untouched."""
        path = self._folder.checkpoints / checkpoint_folder.name_of(step)
        try:
            train.broadcast("save_checkpoint", str(path), dict(state))
        except CheckpointError as error:
            self._failed_saves += 1
            free = shutil.disk_usage(self._folder.path).free
            log.error(
                "checkpoint of step %d failed (%d in a row, %d bytes free): %s",
                step,
                self._failed_saves,
                free,
                error,
            )
            self.progress.message(f"checkpoint of step {step} FAILED, training goes on: {error}")
            if self._failed_saves >= self._config.loop.checkpoint.max_failed:
                raise
            return
        self._failed_saves = 0
        self._exports.request(step, last=step == self._config.loop.steps)
        spare = [checkpoint_folder.name_of(needed) for needed in self._exports.needed]
        keep = self._config.loop.checkpoint.keep
        checkpoint_folder.prune(self._folder.checkpoints, keep=keep, spare=spare)

    def close(self) -> None:
        self.progress.close()
        for tracker in self._trackers:
            tracker.close()
