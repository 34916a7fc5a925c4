"""runs/<name>/: one owner at a time, where everything of a run lies, and what trackers are told of it."""

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

from mrl.files import take_lock

log = logging.getLogger(__name__)


class RunFolder:
    """Paths of a run; holds an exclusive lock until closed or the process ends."""

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
        """config.yaml as resolved (reloadable as it is) and versions.json of the packages it ran with."""
        (self.path / "config.yaml").write_text(text, encoding="utf-8")
        (self.path / "versions.json").write_text(
            json.dumps(dict(versions), indent=1) + "\n", encoding="utf-8"
        )

    def write_hardware(self, devices: Sequence[str]) -> None:
        """hardware.json: the devices of the trainer ranks by name, and the driver's machine; a full disk is a warning."""
        machine = {"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}
        self._write("hardware.json", {"trainer_devices": dict(Counter(devices)), "driver": machine})

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """summary.json; a full disk is a warning, because what ended the run must not be covered by it."""
        self._write("summary.json", dict(summary))

    def _write(self, name: str, tree: Mapping[str, object]) -> None:
        path = self.path / name
        try:
            path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)

    def close(self) -> None:
        os.close(self._lock)


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    """One start of a run, the first or a resumed one."""

    folder: Path
    """The run folder; a tracker keeps its id of the run there."""
    name: str
    config: Mapping[str, Any]
    """The resolved configuration as JSON values."""
    first_step: int
    """First step of this start; earlier ones are in metrics.jsonl, later ones are run again."""
