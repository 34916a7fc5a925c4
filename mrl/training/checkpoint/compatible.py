"""Whether a run can go on from a checkpoint: the same kind of model, in the same type, from the same starting point. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.errors import CheckpointError


def require_compatible(
    path: Path, saved: Mapping[str, Any], about: Mapping[str, Any], folders: Sequence[str]
) -> None:
    """CheckpointError, with what to do, unless a run of `about` can go on from the checkpoint.

    Args:
        path: the checkpoint.
        saved: what its manifest says of the run that saved it.
        about: the same of the run that is to go on (mrl/training/hf/base.py, run_about).
        folders: where in the checkpoint each model lies that the run trains.
    """
    if saved["model_type"] != about["model_type"]:
        raise CheckpointError(f"{path} is a {saved['model_type']}, the run trains a {about['model_type']}")
    if saved["dtype"] != about["dtype"]:
        raise CheckpointError(
            f"{path} was trained in {saved['dtype']}, training.dtype is {about['dtype']}; set it to the same"
        )
    _check_adapters(path, saved.get("lora"), about.get("lora"))
    _check_model(path, saved.get("model"), about.get("model"))
    for name in folders:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path} holds no {name}, which this run trains; start from another checkpoint"
            )


def _check_model(path: Path, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """A run goes on with the model that it started from, wherever that lies by now."""
    for name, what in (("digest", "weights"), ("config_digest", "settings in config.json")):
        if saved and own and saved[name] != own[name]:
            raise CheckpointError(
                f"{path} is of a run that started from the model in {saved['path']}; model.path = {own['path']} has other {what}. Name "
                "that model again, or choose another run.name: mrl export writes the trained weights, for model.path of a new run"
            )


def _check_adapters(path: Path, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """A checkpoint of adapters goes on with the same ones; _check_model() looks at their base."""
    if saved is None or own is None:
        if saved is not own:
            holds, trains = ("adapters", "all weights") if own is None else ("all weights", "adapters")
            raise CheckpointError(
                f"{path} holds {holds}, the run trains {trains}: training.lora must stay as it was"
            )
        return
    for name in (name for name in saved if not name.startswith("base") and saved[name] != own[name]):
        raise CheckpointError(
            f"{path} has training.lora.{name} = {saved[name]}, the run {own[name]}; set it to the same"
        )
