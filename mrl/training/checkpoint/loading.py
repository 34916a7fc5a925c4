"""Load a checkpoint on all ranks together, also one saved in another layout."""

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
from mrl.training.checkpoint import checkpoint_folder, plain_values, restricted_pickle
from mrl.training.checkpoint.atomic_save import random_file
from mrl.training.checkpoint.compatible import require_compatible
from mrl.training.checkpoint.random_state import set_random_state
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.platform.parallel import run_everywhere, run_on_rank_zero

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable that restricts every torch.load to tensors and plain values."""


def load_state(path: Path, states: Mapping[str, TrainingState], *, about: dict[str, Any]) -> dict[str, Any]:
    """Load `path` on all ranks together and return its `extra`.

    Each rank first verifies its share. If a file is damaged, DamagedCheckpoint is raised on all ranks and
    nothing is loaded. Raise CheckpointError for another model.
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
    if manifest["about"]["layout"] == about["layout"]:  # else rank numbers mean other places
        file = path / random_file(rank)
        with _unreadable(file):
            set_random_state(plain_values.loads(file.read_bytes()))
    extra = checkpoint_folder.read_extra(path)
    dist.barrier()
    return extra


def _require_closed(folder: Path) -> None:
    """Read an index with the closed list of classes before torch does; raise CheckpointError for others."""
    with _unreadable(folder / ".metadata"):
        restricted_pickle.read_index(folder)


@contextlib.contextmanager
def _no_code_run() -> Iterator[None]:
    """Set _WEIGHTS_ONLY for the block: torch's reader accepts any objects in the shared state."""
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
    """Raise CheckpointError if the block cannot read `path` as part of a checkpoint."""
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
