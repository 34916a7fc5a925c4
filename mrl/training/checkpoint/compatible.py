"""Check that a run can resume from a checkpoint: same kind of model, type and starting point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.errors import CheckpointError


def require_compatible(
    path: Path, saved: Mapping[str, Any], about: Mapping[str, Any], folders: Sequence[str]
) -> None:
    """Raise CheckpointError, with what to do, unless a run of `about` can resume from the checkpoint.

    Args:
        path: Checkpoint.
        saved: Its manifest's facts about the run that saved it.
        about: The same about the resuming run (mrl/training/hf/base.py, run_identity).
        folders: Folder of each trained model inside the checkpoint.
    """
    if saved["model_type"] != about["model_type"]:
        raise CheckpointError(
            f"{path} is a {saved['model_type']}, but the run trains a {about['model_type']}"
        )
    if saved["dtype"] != about["dtype"]:
        raise CheckpointError(
            f"{path} was trained in {saved['dtype']}, but training.dtype is {about['dtype']}; set both equal"
        )
    _check_adapters(path, saved.get("lora"), about.get("lora"))
    if saved.get("drafts") != about.get("drafts"):
        raise CheckpointError(
            f"{path} is of a run with training.drafts = {saved.get('drafts', 'frozen')}, but this run has "
            f"{about.get('drafts', 'frozen')}; set both equal"
        )
    _check_model(path, saved.get("model"), about.get("model"))
    for name in folders:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path} contains no {name}, which this run trains; start from another checkpoint"
            )


def _check_model(path: Path, saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> None:
    """Require the starting model of the saved run, wherever it is stored now."""
    for name, part in (("digest", "weights"), ("config_digest", "settings in config.json")):
        if saved and current and saved[name] != current[name]:
            raise CheckpointError(
                f"{path} is of a run that started from the model in {saved['path']}, but model.path = "
                f"{current['path']} has other {part}; set model.path to that model, or choose another "
                "run.name and start from the trained weights (mrl export, model.path)"
            )


def _check_adapters(path: Path, saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> None:
    """Require the same adapters; _check_model() checks their base."""
    if saved is None or current is None:
        if saved is not current:
            stored, trains = ("adapters", "all weights") if current is None else ("all weights", "adapters")
            raise CheckpointError(
                f"{path} contains {stored}, but the run trains {trains}; set training.lora as it was saved"
            )
        return
    for name in (name for name in saved if not name.startswith("base") and saved[name] != current[name]):
        raise CheckpointError(
            f"{path} has training.lora.{name} = {saved[name]}, but the run {current[name]}; set both equal"
        )
