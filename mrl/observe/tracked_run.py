"""What a tracker is told of the run it follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
