"""Whether a tuning can go on from a checkpoint: what it has in common with the one that saved. Imports no engine: `mrl tune` asks
before its ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.tune import TuneSection
from mrl.data.tune_rows import TuneRows
from mrl.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of the tuning."""


def require_same_tuning(
    checkpoints: Path, state: Mapping[str, Any], config: Config, section: TuneSection, training: TuneRows
) -> None:
    """ConfigError unless a tuning can go on from a checkpoint's state. Which model it started from is in the manifest."""
    saved = state.get("about", {})
    others = [name for name, value in about(config, section, training).items() if saved.get(name) != value]
    if others:
        raise ConfigError(
            f"{checkpoints} is of a run with other {', '.join(others)}; choose another run.name, or remove the folder"
        )


def about(config: Config, section: TuneSection, training: TuneRows) -> dict[str, Any]:
    """What a tuning that goes on has in common with the one that saved, beside the model."""
    return {
        "rows": training.digest(),
        "tune.objective": section.objective.model_dump_json(),
        "tune.batch_rows": section.batch_rows,
        "tune.epochs": section.passes is None,
        "run.seed": config.run.seed,
    }
