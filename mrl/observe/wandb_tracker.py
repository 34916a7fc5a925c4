"""Weights & Biases: one W&B run for all starts of a training run, every step once.

A W&B history is append-only and its steps only rise. Online, nothing up to the server's last step is sent: a
step repeated after a crash keeps its first figures. Offline, every start has its own folder, and `wandb sync`
joins folders of one id as they are; so an earlier start's unsynced folder is put aside, and the new one takes
the whole history from metrics.jsonl, which has the figures that count. Synced steps are not sent again. wandb
writes its file every 15 s, so a killed start's last steps may be missing there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrl.errors import ConfigError
from mrl.observe.run_folder import TrackedRun
from mrl.observe.samples_log import Row, samples_table

LAST_STEP = "last_step"
"""File in an offline start's folder: the last step it was given."""


class WandbTracker:
    """One W&B run whose id is kept in the run folder, so that a resumed run continues it."""

    def __init__(self, run: TrackedRun, project: str, *, deadline_seconds: float) -> None:
        import wandb

        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            raise ConfigError("no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline")
        self._run = wandb.init(
            id=_kept_id(run.folder / "wandb_id"),
            resume="allow",
            project=project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,
            # The console is the driver's; wandb's exit hook must not wait for a server longer than we do.
            settings=wandb.Settings(console="off", finish_timeout=deadline_seconds),
        )
        self._folder = Path(self._run.dir).parent
        self.next_step = (
            after_synced(self._folder, self._run.id) if self._run.offline else int(self._run.step)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)
        if self._run.offline:
            (self._folder / LAST_STEP).write_text(str(step))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Log a table of the step, which its metrics complete."""
        import wandb

        columns, values = samples_table(rows)
        table = wandb.Table(columns=list(columns), allow_mixed_types=True)
        for row in values:
            table.add_data(*row)
        self._run.log({f"samples/{rows[0]['kind']}": table}, step=step, commit=False)

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """Return the run's id, created at the first start."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text()


def after_synced(folder: Path, run_id: str) -> int:
    """Return the first step that earlier offline starts did not sync; put the unsynced folders aside."""
    first = 0
    for earlier in sorted(folder.parent.glob(f"offline-run-*-{run_id}")):
        if earlier == folder:
            continue
        if any(earlier.glob("*.wandb.synced")):
            last = earlier / LAST_STEP
            first = max(first, int(last.read_text()) + 1 if last.is_file() else 0)
        else:
            earlier.rename(earlier.with_name(f"replaced-{earlier.name}"))
    return first
