"""Loads a checkpoint on all ranks together, also one that ranks of another layout saved."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from mrl.errors import CheckpointError
from mrl.training.checkpoint import folder as checkpoint_folder
from mrl.training.checkpoint.random_state import set_random_state
from mrl.training.checkpoint.saving import random_file
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.platform.parallel import run_everywhere


def load_state(path: Path, states: Mapping[str, TrainingState], *, about: dict[str, Any]) -> dict[str, Any]:
    """Reads `path` on all ranks together and returns its `extra`.

    The ranks verify it first, each its share: DamagedCheckpoint on all of them where a file is not what was
    saved, and nothing is loaded then. CheckpointError where it is of another model.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    run_everywhere(lambda: checkpoint_folder.verify(path, share=rank, shares=world))
    manifest = checkpoint_folder.read_manifest(path)
    _check(path, manifest["about"], about, states)
    for name, state in states.items():
        loaded: Any = dist_checkpointing.load(state.sharded(), str(path / name))
        state.restore(loaded)
    if manifest["about"]["layout"] == about["layout"]:  # in another layout ranks mean something else
        set_random_state(pickle.loads((path / random_file(rank)).read_bytes()))
    extra = checkpoint_folder.read_extra(path)
    dist.barrier()
    return extra


def _check(
    path: Path, saved: Mapping[str, Any], about: Mapping[str, Any], folders: Mapping[str, Any]
) -> None:
    if saved["model_type"] != about["model_type"]:
        raise CheckpointError(f"{path} is a {saved['model_type']}, the run trains a {about['model_type']}")
    if saved["dtype"] != about["dtype"]:
        raise CheckpointError(
            f"{path} was trained in {saved['dtype']}, training.dtype is {about['dtype']}; set it to the same"
        )
    _check_adapters(path, saved.get("lora"), about.get("lora"))
    for name in folders:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path} holds no {name}, which this run trains; start from another checkpoint"
            )


def _check_adapters(path: Path, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """A checkpoint of adapters goes on with the same ones of the same base, wherever that lies by now."""
    if saved is None or own is None:
        if saved is not own:
            holds, trains = ("adapters", "all weights") if own is None else ("all weights", "adapters")
            raise CheckpointError(
                f"{path} holds {holds}, the run trains {trains}: training.lora must stay as it was"
            )
        return
    for name in (name for name in saved if name != "base" and saved[name] != own[name]):
        if name == "base_digest":
            raise CheckpointError(
                f"{path} holds adapters of other weights than those of model.path = {own['base']}; they were in {saved['base']}"
            )
        raise CheckpointError(
            f"{path} has training.lora.{name} = {saved[name]}, the run {own[name]}; set it to the same"
        )
