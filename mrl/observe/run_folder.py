"""Manage runs/<name>/: its lock, the paths of a run's files, and what trackers know of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mrl.files import release_lock, take_lock

log = logging.getLogger(__name__)


class RunFolder:
    """Folder of a run; holds an exclusive lock until it is closed or the process ends."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        refusal = f"run folder {self.path} is in use by {{owner}}; wait for it, or choose another run.name"
        self._lock = take_lock(self.path / "lock", refusal)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def expert_load(self) -> Path:
        return self.path / "expert_load.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_config(self, text: str, versions: Mapping[str, str]) -> None:
        """Write config.yaml as resolved (it can be loaded again) and versions.json of the packages used."""
        (self.path / "config.yaml").write_text(text, encoding="utf-8")
        (self.path / "versions.json").write_text(
            json.dumps(dict(versions), indent=1) + "\n", encoding="utf-8"
        )

    def write_hardware(self, devices: Sequence[str]) -> None:
        """Write hardware.json: trainer devices and the driver's machine; only warn on a full disk."""
        machine = {"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}
        self._write("hardware.json", {"trainer_devices": dict(Counter(devices)), "driver": machine})

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json; only warn on a full disk, so as not to hide why the run ended."""
        self._write("summary.json", dict(summary))

    def _write(self, name: str, tree: Mapping[str, object]) -> None:
        path = self.path / name
        try:
            path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("%s: cannot write: %s", path, error)

    def close(self) -> None:
        release_lock(self._lock)


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    """One start of a run, the first or a resumed one."""

    folder: Path
    """Run folder, in which a tracker keeps its id of the run."""
    name: str
    config: Mapping[str, Any]
    """Resolved configuration as JSON values."""
    first_step: int
    """First step of this start; earlier ones are in metrics.jsonl, later ones are run again."""
