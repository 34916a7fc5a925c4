"""Records of a run: rows of metrics, samples, ledger lines, trackers, and progress on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from mrl.config.root import Config
from mrl.loops.nan_guard import BadNumbers
from mrl.observe import trackers
from mrl.observe.ledger_log import InFlightPrompts, LedgerLog
from mrl.observe.metrics_log import LAYERS, LoggedRows, MetricsLog
from mrl.observe.phases import PhaseClock
from mrl.observe.progress import ProgressPrinter
from mrl.observe.run_folder import RunFolder, TrackedRun
from mrl.observe.samples_log import SamplesLog, write_named
from mrl.observe.token_values import Pieces, TokenValues
from mrl.samples import Group, TrainBatch

RESUMED = ("resume/undone_steps", "resume/undone_prompts", "resume/dropped_samples", "resume/dropped_groups")
"""Additional metrics of a resumed run's first row."""

TABLES_EVERY = 20
"""Steps between two tables of samples in trackers; a table has the step's rows of samples.jsonl."""
TOKEN_VALUES = 4
"""Samples per step that are written with each token's text, log-prob, ratio, staleness and advantage."""


class Recorder:
    """Writer of a run's records. A failing tracker or a full disk never loses a training step."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        clock: PhaseClock,
        *,
        first_step: int,
        pieces: Pieces | None = None,
    ) -> None:
        """`pieces`: turns tokens into one text each; None leaves out tokens' values."""
        self._pieces = pieces
        self._folder, self.clock = folder, clock
        self._metrics = MetricsLog(folder.metrics)
        self._layers = MetricsLog(folder.expert_load)
        for rows in (self._metrics, self._layers):
            rows.resume_at(first_step)
        self._ledger = LedgerLog(folder.ledger)
        section = config.logging
        self._samples = SamplesLog(folder.samples, limit=section.samples_per_step, limit_tokens=TOKEN_VALUES)
        self._dropped_samples = self._samples.resume_at(first_step, validated=self.has_row(first_step - 1))
        run = TrackedRun(folder.path, config.run.name, config.model_dump(mode="json"), first_step)
        self._trackers = trackers.start_trackers(config.logging, run, history=LoggedRows(folder.metrics))
        self.progress = ProgressPrinter(config.loop.steps)
        self.last_row: dict[str, float] = {}

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row of metrics.jsonl; metrics of single layers go to expert_load.jsonl."""
        row = {**metrics, "mem/driver_bytes": float(psutil.Process().memory_info().rss)}
        row = self._write(step, row)
        self.progress.step(step, row)
        self.last_row = row

    def has_row(self, step: int) -> bool:
        """Return False if the run died after it saved this step and before it wrote the row."""
        return self._metrics.has(step)

    def _write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write a row to all logs; return the part that metrics.jsonl gets."""
        row = {name: value for name, value in metrics.items() if not name.startswith(LAYERS)}
        self._metrics.write(step, row)
        if layers := {name: value for name, value in metrics.items() if name not in row}:
            self._layers.write(step, layers)
        for tracker in self._trackers:
            tracker.log(step, row)
        return row

    def start(self, step: int, standing: InFlightPrompts, *, newer_groups: int) -> dict[str, float]:
        """Write the ledger.jsonl line of an attempt that begins with this step; return what a resume undoes,
        for its first row. `newer_groups`: number of the checkpoint's groups with tokens of lost weights."""
        undone = self._ledger.start(step, standing)
        if self._ledger.attempt == 1:
            return {}
        prompts = sum(undone)
        if undone or newer_groups or self._dropped_samples:
            self.progress.message(
                f"dropped data of weights that no longer exist: {len(undone)} steps on {prompts} prompts, "
                f"repeated, {self._dropped_samples} rows of samples.jsonl, "
                f"{newer_groups} groups of the checkpoint"
            )
        counts = len(undone), prompts, self._dropped_samples, newer_groups
        return dict(zip(RESUMED, map(float, counts), strict=True))

    def prompts(self, step: int, trained: Sequence[Group], standing: InFlightPrompts) -> None:
        """Write the step's line of ledger.jsonl."""
        self._ledger.step(step, [group.prompt.index for group in trained], standing)

    def samples(
        self, step: int, groups: Sequence[Group], *, kind: str = "train", batch: TrainBatch | None = None
    ) -> None:
        """Write some of the samples, with their tokens' values if `batch`, the packed groups, is given."""
        tokens = TokenValues(batch, self._pieces) if batch is not None and self._pieces else None
        rows = self._samples.write(step, groups, kind=kind, tokens=tokens)
        if step % TABLES_EVERY == 0:
            for tracker in self._trackers:
                tracker.samples(step, rows)

    def bad_samples(self, step: int, groups: Sequence[Group], error: BadNumbers) -> None:
        """Write the samples whose numbers ended the run to bad_samples.jsonl."""
        path = self._folder.path / "bad_samples.jsonl"
        write_named(path, step, groups, error.sample_ids, reason=str(error))
        self.progress.message(f"{len(error.sample_ids)} sample(s) with bad numbers written to {path}")

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
