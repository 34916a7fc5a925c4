"""Checkpoints of a run: save them, keep the configured number, request Hugging Face exports."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.export import ExportSection
from mrl.errors import CheckpointError
from mrl.loops.exports import Exports
from mrl.loops.learn import TrainerRanks
from mrl.observe.run_folder import RunFolder
from mrl.training.checkpoint import checkpoint_folder

log = logging.getLogger(__name__)


class Checkpoints:
    """Saver of a run's checkpoints. A failed save is logged and leaves the previous checkpoint untouched."""

    def __init__(self, config: Config, folder: RunFolder, exports: Exports | None = None) -> None:
        self._section, self._last_step, self._folder = config.loop.checkpoint, config.loop.steps, folder
        self._exports = exports or Exports(ExportSection(), folder.path, run_name=config.run.name)
        self._failed_saves = 0
        self._last_saved: int | None = None
        self.pending: int | None = None
        """Step whose checkpoint is being written while training continues, if any."""

    def save(self, trainer: TrainerRanks, *, step: int, state: Mapping[str, Any], goes_on: bool) -> None:
        """Save a checkpoint; raise its error after loop.checkpoint.max_failed failures in a row.

        It is committed on return, unless training continues and loop.checkpoint.async_save is set.
        """
        self.finish(trainer)
        path = self._folder.checkpoints / checkpoint_folder.name_of(step)
        beside = goes_on and self._section.async_save
        if step == self._last_saved:  # the run stops right after a step that saved
            return

        def save() -> None:
            checkpoint_folder.rename_rejected_from(path)
            trainer.save_checkpoint(path, state, beside=beside)

        if not self._succeeds(step, save):
            return
        if beside:
            self.pending = step
        else:
            self._committed(step)

    def poll(self, trainer: TrainerRanks) -> None:
        """Commit the pending checkpoint if its files are written. Never waits."""
        if self.pending is not None and trainer.checkpoint_is_written():
            self.finish(trainer)

    def finish(self, trainer: TrainerRanks) -> None:
        """Commit the pending checkpoint, if any; wait for its files."""
        step, self.pending = self.pending, None
        if step is not None and self._succeeds(step, trainer.commit_checkpoint):
            self._committed(step)

    def _committed(self, step: int) -> None:
        self._failed_saves, self._last_saved = 0, step
        self._exports.request(step, last=step == self._last_step)
        spare = [checkpoint_folder.name_of(needed) for needed in self._exports.needed]
        checkpoint_folder.prune(self._folder.checkpoints, keep=self._section.keep, spare=spare)

    def _succeeds(self, step: int, action: Callable[[], None]) -> bool:
        try:
            action()
        except (CheckpointError, OSError) as error:
            self._report_failure(step, error)
            if self._failed_saves >= self._section.max_failed:
                raise
            return False
        return True

    def poll_exports(self) -> None:
        """Poll the exports without waiting; call it after the step's row, which the model card quotes."""
        self._exports.poll()

    def _report_failure(self, step: int, error: Exception) -> None:
        self._failed_saves += 1
        free = shutil.disk_usage(self._folder.path).free
        log.error(
            "checkpoint of step %d FAILED, training goes on: %s (%d in a row, %d bytes free)",
            step, error, self._failed_saves, free,
        )  # fmt: skip
