"""One checkpoint being saved: all ranks begin it, each writes its files in the background, and all commit it.

Nothing is visible before the commit's rename. A killed save leaves a partial folder that is never resumed
from. checkpoint_folder.py defines which folders are valid.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.errors import CheckpointError
from mrl.files import commit_folder, partial_of, start_folder, sync, write_durably
from mrl.training.checkpoint import checkpoint_folder, plain_values
from mrl.training.checkpoint.checkpoint_folder import EXTRA_FILE
from mrl.training.checkpoint.random_state import random_state
from mrl.training.checkpoint.shard_writer import ShardedWrite, WrittenFiles
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.platform.parallel import run_everywhere, run_on_rank_zero


class Save:
    """Save of a checkpoint to `path`, ended by commit(). All ranks call every method but is_written()
    together. If one rank cannot write, CheckpointError is raised on all, and nothing of the save remains."""

    def __init__(
        self, path: Path, states: Mapping[str, TrainingState], *, extra: dict[str, Any], about: dict[str, Any]
    ) -> None:
        """Plan the save. `extra` (rank 0's) contains plain values (plain_values.py); `about` is JSON.
        `states` maps each folder inside `path` to its state, "" (the path itself) to the policy's."""
        self._path, self._about = path, about
        self._partial = partial_of(path)
        self._small = {random_file(dist.get_rank()): plain_values.dumps(random_state())}
        if dist.get_rank() == 0:
            self._small[EXTRA_FILE] = plain_values.dumps(extra)
        self._written: dict[str, WrittenFiles] = {}
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        run_on_rank_zero(lambda: _start(path, states))
        self._writes: dict[str, ShardedWrite] = {}
        self._or_remove(lambda: self._plan(states))

    def write(self) -> None:
        """Write this rank's files now, straight from the state; one tensor at a time is copied."""
        self._or_remove(lambda: run_everywhere(self._write))

    def write_in_background(self) -> None:
        """Copy this rank's state to host memory, and write it in a background thread."""
        self._or_remove(lambda: run_everywhere(self._stage))
        self._thread = threading.Thread(target=self._write_quietly, name="checkpoint", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Return True if commit() would not wait for this rank's files."""
        return self._thread is None or not self._thread.is_alive()

    def commit(self) -> None:
        """Wait for the files of all ranks and make the checkpoint visible."""
        self._or_remove(self._finish)

    def _plan(self, states: Mapping[str, TrainingState]) -> None:
        for name, state in states.items():
            self._writes[name] = ShardedWrite(state.sharded(), self._partial / name)

    def _stage(self) -> None:
        for write in self._writes.values():
            write.stage()

    def _write_quietly(self) -> None:
        try:
            self._write()
        except Exception as error:  # raised on all ranks by commit()
            self._error = error

    def _write(self) -> None:
        for name, write in self._writes.items():
            self._written[name] = write.write()
        for name, data in self._small.items():
            write_durably(self._partial / name, data)

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        run_everywhere(self._raise)
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._written, everyone, dst=0)
        run_on_rank_zero(lambda: self._commit(everyone or []))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _commit(self, everyone: list[dict[str, WrittenFiles]]) -> None:
        """Write indices, digests of the few small files and the manifest, and rename; on rank 0."""
        files: dict[str, Any] = {}
        for name, write in self._writes.items():
            parts = [written[name] for written in everyone]
            write.finish([result for part in parts for result in part.results])
            files |= {str(Path(name, file)): entry for part in parts for file, entry in part.files.items()}
        small = [name for name in checkpoint_folder.file_names(self._partial) if name not in files]
        files |= checkpoint_folder.digests(self._partial, small)
        manifest = {
            "version": checkpoint_folder.VERSION,
            "about": self._about,
            "files": dict(sorted(files.items())),
        }
        write_durably(self._partial / checkpoint_folder.MANIFEST, json.dumps(manifest, indent=1).encode())
        for folder in {(self._partial / name).parent for name in files}:
            sync(folder)
        commit_folder(self._path)

    def _or_remove(self, action: Callable[[], None]) -> None:
        """Remove the partial folder on an error: a full disk needs its space back."""
        try:
            action()
        except CheckpointError:
            run_on_rank_zero(lambda: shutil.rmtree(self._partial, ignore_errors=True))
            raise


def save_weights(folder: Path, state: TrainingState) -> None:
    """Write only the model into a folder for an export; raise CheckpointError on all ranks alike."""
    run_on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
    run_on_rank_zero(lambda: folder.mkdir(parents=True))
    write, written = ShardedWrite(state.sharded_weights(), folder), WrittenFiles([], {})

    def write_own() -> None:
        nonlocal written
        written = write.write()

    run_everywhere(write_own)
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(written.results, everyone, dst=0)
    run_on_rank_zero(lambda: write.finish([result for results in everyone or [] for result in results]))


def random_file(rank: int) -> str:
    """Return the file name of a rank's random states."""
    return f"random-{rank:05d}.msgpack"


def _start(path: Path, folders: Iterable[str]) -> None:
    if path.exists():
        raise CheckpointError(f"{path} already exists and is never overwritten; save to another path")
    partial = start_folder(path)
    for name in folders:
        (partial / name).mkdir(exist_ok=True)
