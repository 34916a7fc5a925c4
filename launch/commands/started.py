"""What a folder already has of the run, tuning or measurement that is started again in it: the date of its templates, its checkpoint."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config.merge import tree_of
from mrl.config.root import Config
from mrl.errors import CheckpointError, ConfigError
from mrl.observe import metrics_log
from mrl.training.checkpoint import checkpoint_folder
from mrl.training.checkpoint.compatible import require_compatible
from mrl.training.hf import base

CRITIC = "critic"
"""The folder of the value model in a checkpoint."""


def dated(config: Config, date: object = None) -> Config:
    """Return the configuration with model.chat_template_date: its own, else `date` in ISO form if it is one, else today."""
    if config.model.chat_template_date is not None:
        return config
    try:
        found = datetime.date.fromisoformat(str(date))
    except ValueError:
        found = datetime.date.today()
    model = config.model.model_copy(update={"chat_template_date": found})
    return config.model_copy(update={"model": model})


def dated_as_begun(config: Config, folder: Path) -> Config:
    """The same with the date of the run's first start in `folder`, which its config.yaml has."""
    try:
        section = tree_of((folder / "config.yaml").read_text(encoding="utf-8"))["model"]
        return dated(config, section["chat_template_date"])
    except (OSError, ValueError, KeyError, TypeError):
        return dated(config)


def newest(checkpoints: Path) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """Return the newest checkpoint that looks whole: its folder, what its manifest says of its run, and the loop's state.

    No digest is compared: whoever loads it does that, and may take the one before.
    """
    for folder in checkpoint_folder.candidates(checkpoints):
        try:
            about = checkpoint_folder.verify_sizes(folder)["about"]
            return folder, about, checkpoint_folder.read_extra(folder)["user"]
        except CheckpointError:
            continue
    return None


def position(config: Config) -> dict[str, Any] | None:
    """Return where in its rows the run's newest checkpoint is (mrl/data/prompt_stream.py); None without one."""
    found = newest(Path(config.run_folder) / "checkpoints")
    supply = found[2].get("supply") if found is not None else None
    return supply.get("stream") if isinstance(supply, dict) else None


def require_same_model(folder: Path, saved: Mapping[str, Any], config: Config) -> None:
    """ConfigError unless a run of these settings can go on from the checkpoint, as far as models go."""
    try:
        digest = base.digest_like(saved.get("model"), config.model.path)
        about = base.run_about(config.model, config.training, digest)
        require_compatible(folder, saved, about, [CRITIC] if config.critic is not None else [])
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def is_done(config: Config) -> bool:
    """Whether the run's newest checkpoint, whose files are read and compared, is of its last step, and its row is written."""
    run = Path(config.run_folder)
    found = newest(run / "checkpoints")
    if found is None or not isinstance(step := found[2].get("next_step"), int) or step <= config.loop.steps:
        return False
    try:
        checkpoint_folder.verify_files(found[0])
    except CheckpointError:
        return False
    return metrics_log.MetricsLog(run / "metrics.jsonl").has(step - 1)
