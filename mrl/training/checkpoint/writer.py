"""Writes sharded state in Megatron's torch-distributed format where one rank's error is all ranks'.

Megatron's own `save` writes some files on one rank between collectives: a full disk there leaves the others
waiting. And its writer forks processes and spawns a manager; inside an actor that can hang or leave orphans.
Here planning is Megatron's, each rank writes its files itself in the calling thread, and all ranks agree
after every kind.
"""

from __future__ import annotations

import functools
import io
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from mrl.errors import CheckpointError
from mrl.files import write_durably
from mrl.training.platform.parallel import run_everywhere, run_on_rank_zero


def write_sharded(state: dict[str, Any], folder: Path) -> None:
    """Writes all of Megatron's files of one sharded state dict into a folder; CheckpointError on all ranks
    alike."""
    sharded, common = save_preprocess(state, True)
    strategy = _InProcessSave()
    run_on_rank_zero(lambda: _write_common(common, folder / COMMON_STATE_FNAME))
    run_on_rank_zero(
        lambda: save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))
    )
    request = strategy.async_save(sharded, str(folder))
    assert request.async_fn is not None
    run_everywhere(request.async_fn)
    for finalize in request.finalize_fns:
        finalize()


def _write_common(common: Any, path: Path) -> None:
    """Writes what all ranks share, from memory: torch's own writing hides the system's word for a failure."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    write_durably(path, buffer.getvalue())


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch-distributed format, written by the calling thread."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> AsyncRequest:
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment] instead of a manager process
        return super().async_save(sharded_state_dict, checkpoint_dir, "mcore")

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, async_strategy: str
    ) -> AsyncRequest:
        metadata = save_state_dict_ret[1]
        return AsyncRequest(
            functools.partial(_write, writer), (), [functools.partial(_finish, writer, metadata)]
        )


def _write(writer: Any) -> None:
    """Writes this rank's tensor files."""
    results: queue.Queue[Any] = queue.Queue()
    written: dict[int, Any] = {}
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    for number, bucket in enumerate(writer.preload_tensors(writer.write_buckets or [], False)):
        counter: queue.Queue[int] = queue.Queue()
        counter.put(number)
        writer.write_preloaded_data(transforms, number, bucket, results, counter, True)
        index, outcome = results.get_nowait()
        if isinstance(outcome, Exception):
            raise CheckpointError(f"writing {bucket[0]} failed: {_first_cause(outcome)}") from outcome
        written[index] = outcome
    if writer.results_queue is not None:
        writer.results_queue.put(written)


def _first_cause(error: BaseException) -> BaseException:
    """The operating system's own word where there is one: torch's writer covers it with what follows from it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _finish(writer: Any, metadata: Any) -> None:
    """Rank 0 writes which file holds what."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(writer.retrieve_write_results(), gathered, dst=0)
    run_on_rank_zero(lambda: writer.finish(metadata, gathered))
