"""Chat template date and checkpoint of an earlier start of a run, tuning or measurement in its folder."""

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
"""Folder of the value model in a checkpoint."""


def dated(config: Config, date: object = None) -> Config:
    """Return the configuration with a chat template date: its own, else `date` if it is ISO, else today."""
    if config.model.chat_template_date is not None:
        return config
    try:
        day = datetime.date.fromisoformat(str(date))
    except ValueError:
        day = datetime.date.today()
    model = config.model.model_copy(update={"chat_template_date": day})
    return config.model_copy(update={"model": model})


def dated_as_begun(config: Config, folder: Path) -> Config:
    """Return the configuration with the chat template date of the first start in `folder` (config.yaml)."""
    try:
        section = tree_of((folder / "config.yaml").read_text(encoding="utf-8"))["model"]
        return dated(config, section["chat_template_date"])
    except (OSError, ValueError, KeyError, TypeError):
        return dated(config)


def newest(checkpoints: Path) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """Return the newest complete checkpoint: its folder, its manifest's `about`, and the loop's state.

    Digests are not compared; the loader does that and may use an older checkpoint.
    """
    for folder in checkpoint_folder.candidates(checkpoints):
        try:
            about = checkpoint_folder.verify_sizes(folder)["about"]
            return folder, about, checkpoint_folder.read_extra(folder)["user"]
        except CheckpointError:
            continue
    return None


def position(config: Config) -> dict[str, Any] | None:
    """Return the newest checkpoint's position in the rows (mrl/data/prompt_stream.py), or None."""
    checkpoint = newest(Path(config.run_folder) / "checkpoints")
    supply = checkpoint[2].get("supply") if checkpoint is not None else None
    return supply.get("stream") if isinstance(supply, dict) else None


def require_same_model(folder: Path, saved: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError if the run cannot resume because the checkpoint's models do not match."""
    try:
        digest = base.digest_like(saved.get("model"), config.model.path)
        about = base.run_identity(config.model, config.training, digest)
        require_compatible(folder, saved, about, [CRITIC] if config.critic is not None else [])
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def is_done(config: Config) -> bool:
    """Return True if the newest checkpoint is of the last step and valid, and that step's row is written."""
    run = Path(config.run_folder)
    last = newest(run / "checkpoints")
    if last is None or not isinstance(step := last[2].get("next_step"), int) or step <= config.loop.steps:
        return False
    try:
        checkpoint_folder.verify_files(last[0])
    except CheckpointError:
        return False
    return metrics_log.MetricsLog(run / "metrics.jsonl").has(step - 1)
