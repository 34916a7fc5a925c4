"""Write sharded state in Megatron's torch-distributed format; one rank's error is raised on all ranks.

All ranks plan together, each writes its own file alone, and all finish together. Between plan and finish no
rank waits for another, so training may continue. Megatron's own `save` writes some files on one rank between
collectives (with a full disk there, the others hang), first copies all state to the host, and runs in the
background only in forked processes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mrl.errors import CheckpointError
from mrl.files import write_durably
from mrl.training.platform.parallel import run_on_rank_zero

COMMON = "common_state"
"""Megatron's name of the state that all ranks share."""


@dataclasses.dataclass(slots=True)
class WrittenFiles:
    """Files that one rank wrote into one folder."""

    results: list[WriteResult]
    """Location of each piece."""
    files: dict[str, list[Any]]
    """File name -> [bytes, digest]."""


class ShardedWrite:
    """Write of one sharded state dict into one folder: planned, optionally staged, written, finished."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        """Plan each rank's writes; a collective of all ranks. Raise CheckpointError on all of them alike."""
        self._folder, self._staged = folder, False
        preprocessed: Any = save_preprocess(state, True)
        sharded, common = preprocessed
        sharded[COMMON] = ShardedObject(COMMON, common, (1,), (0,), replica_id=dist.get_rank())
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self._planner.set_up_planner(mcore_to_pyt_state_dict(flat), is_coordinator=dist.get_rank() == 0)
        self._metadata: Metadata | None = None
        """Complete index, on rank 0."""
        plan = self._planner.create_local_plan()
        plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(plan, plans, dst=0)
        run_on_rank_zero(lambda: self._index(plans))
        self._items: list[tuple[WriteItem, Any]] = [
            (item, self._planner.resolve_data(item)) for item in plan.items
        ]

    def stage(self) -> None:
        """Copy this rank's data to host memory, so that training may continue before write()."""
        self._items = [(item, _staged(data)) for item, data in self._items]
        self._staged = True

    def write(self) -> WrittenFiles:
        """Write this rank's file alone, one piece in memory at a time. Raise CheckpointError on a fault."""
        written = WrittenFiles([], {})
        if not self._items:
            return written
        name = f"__{dist.get_rank()}_0.distcp"
        try:
            with open(self._folder / name, "wb") as file:
                stream = DigestingStream(file)
                for item, data in self._items:
                    written.results.append(_write_piece(stream, name, item, data, copied=self._staged))
                stream.flush()
                os.fsync(file.fileno())
                written.files[name] = [stream.tell(), stream.hexdigest()]
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"writing {self._folder / name} failed: {_first_cause(error)}") from error
        finally:
            self._items = []
        return written

    def finish(self, results: list[WriteResult]) -> None:
        """Write the index of all ranks' files, on rank 0."""
        assert self._metadata is not None, "only rank 0 has the index"
        self._metadata.storage_data = {result.index: result.storage_data for result in results}
        self._metadata.version = CURRENT_DCP_VERSION
        write_durably(self._folder / ".metadata", pickle.dumps(self._metadata))
        config = dataclasses.asdict(CheckpointingConfig("torch_dist", 1))
        write_durably(self._folder / CONFIG_FNAME, json.dumps(config).encode())

    def _index(self, plans: list[Any] | None) -> None:
        """Build the index; holes and overlaps in the ranks' plans raise errors here."""
        assert plans is not None
        _, self._metadata = self._planner.create_global_plan(plans)


class DigestingStream:
    """File that is digested while it is written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        """Return the digest of everything written so far, equal to checkpoint_folder.file_digest()."""
        return self._hash.hexdigest()


def _write_piece(
    stream: DigestingStream, name: str, item: WriteItem, data: Any, *, copied: bool
) -> WriteResult:
    """Write one tensor or object in the format of torch's reader."""
    start = stream.tell()
    if isinstance(data, Tensor):
        torch.save(data if copied else _staged(data), stream)  # type: ignore[arg-type] has write, tell, flush
    else:
        stream.write(data.getbuffer())
    length = stream.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


def _staged(data: Any) -> Any:
    """Copy a tensor to its own host memory of its size; torch.save would write a view's whole storage."""
    if not isinstance(data, Tensor):
        return data
    copy = torch.empty(data.shape, dtype=data.dtype, device="cpu")
    return copy.copy_(data.detach())


def _first_cause(error: BaseException) -> BaseException:
    """Return the operating system's error if there is one: torch's writer hides it behind later errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error
