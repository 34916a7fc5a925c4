"""Loads a checkpoint on all ranks together, also one that ranks of another layout saved."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from mrl.errors import CheckpointError
from mrl.training.checkpoint import checkpoint_folder, closed_pickle, plain_values
from mrl.training.checkpoint.atomic_save import random_file
from mrl.training.checkpoint.compatible import require_compatible
from mrl.training.checkpoint.random_state import set_random_state
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.platform.parallel import run_everywhere, run_on_rank_zero

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""The variable by which torch.load reads tensors and plain values alone, whoever calls it."""


def load_state(path: Path, states: Mapping[str, TrainingState], *, about: dict[str, Any]) -> dict[str, Any]:
    """Reads `path` on all ranks together and returns its `extra`.

    The ranks verify it first, each its share: DamagedCheckpoint on all of them where a file is not what was
    saved, and nothing is loaded then. CheckpointError where it is of another model.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    run_everywhere(lambda: checkpoint_folder.verify_files(path, share=rank, shares=world))
    manifest = checkpoint_folder.read_manifest(path)
    require_compatible(path, manifest["about"], about, list(states))
    for name, state in states.items():
        run_on_rank_zero(lambda name=name: _require_closed(path / name))
        with _no_code_run(), _unreadable(path / name):
            loaded: Any = dist_checkpointing.load(state.sharded(), str(path / name))
        state.restore(loaded)
    if manifest["about"]["layout"] == about["layout"]:  # in another layout ranks mean something else
        file = path / random_file(rank)
        with _unreadable(file):
            set_random_state(plain_values.loads(file.read_bytes()))
    extra = checkpoint_folder.read_extra(path)
    dist.barrier()
    return extra


def _require_closed(folder: Path) -> None:
    """Reads an index, as torch is about to, by the closed list of classes; CheckpointError where it names another one."""
    with _unreadable(folder / ".metadata"):
        closed_pickle.read_index(folder)


@contextlib.contextmanager
def _no_code_run() -> Iterator[None]:
    """Sets it for the block: torch's reader asks for whatever objects when it reads what ranks share."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


@contextlib.contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """CheckpointError where what the block reads of `path` is not what a checkpoint has there."""
    try:
        yield
    except (
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
        CheckpointException,
    ) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
