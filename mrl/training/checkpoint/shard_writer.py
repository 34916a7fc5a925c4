"""Writes sharded state in Megatron's torch-distributed format, so that one rank's error is all ranks'.

All ranks plan together, each writes its own file by itself, and all meet again to finish: between those two
moments a rank does nothing that another waits for, and may train. Megatron's own `save` writes some files on
one rank between collectives (a full disk there leaves the others waiting), copies all state to the host
first, and runs beside training only in processes that it forks.
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
"""Megatron's name of what all ranks share."""


@dataclasses.dataclass(slots=True)
class Written:
    """What one rank wrote into one folder."""

    results: list[WriteResult]
    """Where each piece lies."""
    files: dict[str, list[Any]]
    """[bytes, digest] of its file, by name."""


class ShardedWrite:
    """One sharded state dict on its way into one folder: planned, perhaps staged, written, finished."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        """Plans what each rank writes; a collective of all ranks. CheckpointError on all of them alike."""
        self._folder, self._staged = folder, False
        found: Any = save_preprocess(state, True)
        sharded, common = found
        sharded[COMMON] = ShardedObject(COMMON, common, (1,), (0,), replica_id=dist.get_rank())
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self._planner.set_up_planner(mcore_to_pyt_state_dict(flat), is_coordinator=dist.get_rank() == 0)
        self._metadata: Metadata | None = None
        """The whole index, on rank 0."""
        own = self._planner.create_local_plan()
        plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, plans, dst=0)
        run_on_rank_zero(lambda: self._index(plans))
        self._items: list[tuple[WriteItem, Any]] = [
            (item, self._planner.resolve_data(item)) for item in own.items
        ]

    def stage(self) -> None:
        """Copies what this rank will write to plain memory, so that training may go on before write()."""
        self._items = [(item, _staged(data)) for item, data in self._items]
        self._staged = True

    def write(self) -> Written:
        """Writes this rank's file, one piece in memory at a time; no collectives. CheckpointError on a fault."""
        written = Written([], {})
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
        """On rank 0: writes the index of what all ranks wrote."""
        assert self._metadata is not None, "the index is rank 0's"
        self._metadata.storage_data = {result.index: result.storage_data for result in results}
        self._metadata.version = CURRENT_DCP_VERSION
        write_durably(self._folder / ".metadata", pickle.dumps(self._metadata))
        config = dataclasses.asdict(CheckpointingConfig("torch_dist", 1))
        write_durably(self._folder / CONFIG_FNAME, json.dumps(config).encode())

    def _index(self, plans: list[Any] | None) -> None:
        """Holes and overlaps of what the ranks plan to write are errors here."""
        assert plans is not None
        _, self._metadata = self._planner.create_global_plan(plans)


class DigestingStream:
    """A file that is digested as it is written."""

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
        """The digest of everything written so far, as folder.file_digest() gives it of the file."""
        return self._hash.hexdigest()


def _write_piece(
    stream: DigestingStream, name: str, item: WriteItem, data: Any, *, copied: bool
) -> WriteResult:
    """One tensor or object, as torch's reader expects it."""
    start = stream.tell()
    if isinstance(data, Tensor):
        torch.save(data if copied else _staged(data), stream)  # type: ignore[arg-type] write, tell and flush suffice
    else:
        stream.write(data.getbuffer())
    length = stream.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


def _staged(data: Any) -> Any:
    """A tensor in plain memory of its own and of its size, which torch.save would otherwise not write alone."""
    if not isinstance(data, Tensor):
        return data
    copy = torch.empty(data.shape, dtype=data.dtype, device="cpu")
    return copy.copy_(data.detach())


def _first_cause(error: BaseException) -> BaseException:
    """The operating system's own word where there is one: torch's writer covers it with what follows from it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error
