"""Check if a tuning can resume from a checkpoint. Imports no engine: `mrl tune` checks before ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.tune import TuneSection
from mrl.data.tune_rows import TuneRows
from mrl.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""Name of the checkpoints' folder in the tuning's folder."""


def require_resumable_tuning(
    checkpoints: Path, state: Mapping[str, Any], config: Config, section: TuneSection, training: TuneRows
) -> None:
    """Raise ConfigError unless a tuning can resume from `state`. The manifest covers the starting model."""
    saved = state.get("about", {})
    changed = [name for name, value in about(config, section, training).items() if saved.get(name) != value]
    if changed:
        raise ConfigError(
            f"{checkpoints} is of a run with different {', '.join(changed)}; choose another run.name, or "
            "remove the folder"
        )


def about(config: Config, section: TuneSection, training: TuneRows) -> dict[str, Any]:
    """Return what a resumed tuning shares with the one that saved, besides the model."""
    return {
        "rows": training.digest(),
        "tune.objective": section.objective.model_dump_json(),
        "tune.batch_rows": section.batch_rows,
        "tune.epochs": section.passes is None,
        "run.seed": config.run.seed,
    }
