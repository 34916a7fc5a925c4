"""Saves and loads a rank's training state in Megatron's distributed format, with an atomic commit.

Here is what the files hold; writer.py writes them, folder.py says which folders are acceptable. Resuming in
another layout is Megatron's resharding ("fully_reshardable").
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel

from mrl.errors import CheckpointError
from mrl.files import commit_folder, partial_of, start_folder, sync, write_durably
from mrl.training.checkpoint import folder as checkpoint_folder
from mrl.training.checkpoint.writer import write_sharded
from mrl.training.platform.parallel import run_everywhere, run_on_rank_zero

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
EXTRA_FILE = "extra.pickle"
"""The caller's own state. Read, like all files, only after its digest was verified."""


class TrainingState:
    """What a checkpoint holds: model chunks, optimizer, schedule, random states."""

    def __init__(self, models: list[Any], optimizer: Any) -> None:
        """`models` are the bare chunks, `optimizer` is mrl.training.optimizer.Optimizer."""
        self._models = models
        self._optimizer = optimizer

    def sharded(self, *, loading: bool) -> dict[str, Any]:
        """The sharded state dict that Megatron saves from or loads into."""
        self._optimizer.prime()
        state = self.sharded_weights()
        state["optimizer"] = self._optimizer.megatron.sharded_state_dict(
            dict(state), is_loading=loading, metadata=dict(SHARDING)
        )
        return state

    def sharded_weights(self) -> dict[str, Any]:
        """The model's part of sharded()."""
        one = len(self._models) == 1
        return {
            "model" if one else f"model{number}": model.sharded_state_dict(prefix="", metadata=dict(SHARDING))
            for number, model in enumerate(self._models)
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a loaded state dict."""
        for number, model in enumerate(self._models):
            model.load_state_dict(state["model" if len(self._models) == 1 else f"model{number}"])
        self._optimizer.load(state["optimizer"])


def save_state(
    path: Path, states: Mapping[str, TrainingState], *, extra: dict[str, Any], about: dict[str, Any]
) -> None:
    """Writes `path` on all ranks together. `extra` (rank 0's) can be pickled; `about` is JSON.

    `states` are by the folder inside `path` that holds them, the policy's in "" (the path itself).
    CheckpointError on all ranks where one could not write; nothing of the attempt is left then.
    """
    partial = partial_of(path)
    run_on_rank_zero(lambda: _start(path, states))
    try:
        for name, state in states.items():
            write_sharded(state.sharded(loading=False), partial / name)
        run_everywhere(lambda: _write_small(partial, extra))
        files = _all_digests(partial)
        run_on_rank_zero(lambda: _commit(path, files, about))
    except CheckpointError:  # a full disk needs its space back
        run_on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise


def save_weights(folder: Path, state: TrainingState) -> None:
    """Writes the model alone into a folder for an export; CheckpointError on all ranks alike."""
    run_on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
    run_on_rank_zero(lambda: folder.mkdir(parents=True))
    write_sharded(state.sharded_weights(), folder)


def load_state(path: Path, states: Mapping[str, TrainingState], *, about: dict[str, Any]) -> dict[str, Any]:
    """Reads `path` on all ranks together and returns its `extra`. CheckpointError where it is not valid."""
    manifest: dict[str, Any] = {}
    run_on_rank_zero(lambda: manifest.update(checkpoint_folder.verify(path)))
    manifest = checkpoint_folder.read_manifest(path)
    if manifest["about"]["model_type"] != about["model_type"]:
        raise CheckpointError(
            f"{path} is a {manifest['about']['model_type']}, the run trains a {about['model_type']}"
        )
    if manifest["about"]["dtype"] != about["dtype"]:
        raise CheckpointError(
            f"{path} was trained in {manifest['about']['dtype']}, training.dtype is {about['dtype']}; set it to the same"
        )
    for name in states:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path} holds no {name}, which this run trains; start from another checkpoint"
            )
    for name, state in states.items():
        loaded: Any = dist_checkpointing.load(state.sharded(loading=True), str(path / name))
        state.restore(loaded)
    if manifest["about"]["layout"] == about["layout"]:  # in another layout ranks mean something else
        set_random_state(pickle.loads((path / _random_file(dist.get_rank())).read_bytes()))
    extra = pickle.loads((path / EXTRA_FILE).read_bytes())
    dist.barrier()
    return extra


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pickle"


def _start(path: Path, folders: Iterable[str]) -> None:
    if path.exists():
        raise CheckpointError(f"{path} exists already; a checkpoint is never overwritten")
    partial = start_folder(path)
    for name in folders:
        (partial / name).mkdir(exist_ok=True)


def _write_small(partial: Path, extra: dict[str, Any]) -> None:
    """Writes this rank's random states, and on rank 0 the caller's state."""
    (partial / _random_file(dist.get_rank())).write_bytes(pickle.dumps(random_state()))
    if dist.get_rank() == 0:
        (partial / EXTRA_FILE).write_bytes(pickle.dumps(extra))


def _all_digests(partial: Path) -> dict[str, Any]:
    """Size and digest of every file by name; each rank reads its share of what was written."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own: dict[str, Any] = {}
    names = checkpoint_folder.file_names(partial)[rank::world]
    run_everywhere(lambda: own.update(checkpoint_folder.digests(partial, names)))
    everyone: list[dict[str, Any]] = [{} for _ in range(world)]
    dist.all_gather_object(everyone, own)
    return {name: entry for part in everyone for name, entry in sorted(part.items())}


def _commit(path: Path, files: dict[str, Any], about: dict[str, Any]) -> None:
    partial = partial_of(path)
    for name in files:  # Megatron syncs the tensor files, not the small ones
        sync(partial / name)
    manifest = {"version": checkpoint_folder.VERSION, "about": about, "files": files}
    write_durably(partial / checkpoint_folder.MANIFEST, json.dumps(manifest, indent=1).encode())
    for folder in {(partial / name).parent for name in files}:
        sync(folder)
    commit_folder(path)


def random_state() -> dict[str, Any]:
    """All random generators of this process that training may draw from."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tracker.get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # not yet run on a GPU
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what random_state() gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
