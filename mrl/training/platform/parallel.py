"""Process groups of one trainer rank: torch.distributed, Megatron's state, and agreements of all ranks.

Owns their start and end, and the check that Megatron's coordinates match the layout.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.cpu import megatron_calls
from mrl.errors import CheckpointError, ConfigError, MrlError
from mrl.models.layout import Layout, RankCoordinates
from mrl.resharding.wire.meeting import TCP


def start_process_groups(
    layout: Layout, *, rank: int, world_size: int, store: str, seed: int, collective_seconds: float
) -> tuple[torch.device, RankCoordinates]:
    """Join all ranks at the address of a store (`wire.meeting.Meeting`) and build Megatron's groups. Their
    collectives fail after `collective_seconds`."""
    if world_size != layout.world_size:
        raise ConfigError(
            f"the layout needs {layout.world_size} ranks (tp x cp x dp x pp), but {world_size} were started"
        )
    device = _start_device(rank)
    where: dict[str, Any] = {"init_method": store}
    if not store.startswith(TCP):
        where = {"store": FileStore(store)}  # the trainers' meshes open it later, so it is not removed here
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        **where,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=collective_seconds),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=device.type == "cuda",
        distributed_timeout_minutes=collective_seconds / 60,  # type: ignore[arg-type] goes into a timedelta
    )
    _seed_generators(seed + rank)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    place = layout.coordinates(rank)
    _check_place(place)
    return device, place


def _seed_generators(seed: int) -> None:
    """Seed the generators other than Megatron's, from which user-defined losses may draw."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _start_device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        megatron_calls.run_on_cpu()
        return torch.device("cpu")
    # The launcher makes one device visible per rank, or all of the node's.
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_place(place: RankCoordinates) -> None:
    ours = (place.tp, place.cp, place.pp, place.dp, place.ep, place.etp)
    megatron = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    assert ours == megatron, (
        f"rank {place.rank}: layout says (tp, cp, pp, dp, ep, etp) = {ours}, Megatron {megatron}"
    )


def stop_process_groups() -> None:
    """Leave all groups; safe to call if none was started."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def max_over_world(value: int, *, device: torch.device) -> int:
    """Return the largest of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def _combine_metric(name: str, values: Iterable[float]) -> float:
    """Sum a metric's values; take the largest for names ending in _max, the smallest for _min."""
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return float(sum(values))


def reduce_metrics(parts: Iterable[Mapping[str, Tensor]], *, device: torch.device) -> dict[str, float]:
    """Combine the parts of all ranks; a rank may have none. Returns the same everywhere."""
    values_of: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values_of.setdefault(name, []).append(float(value))
    local = {name: _combine_metric(name, values) for name, values in values_of.items()}
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, local)
    names = sorted({name for rank in everyone for name in rank})
    return {name: _combine_metric(name, [rank[name] for rank in everyone if name in rank]) for name in names}


def gather_entries[T](entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of all ranks, sorted by name, on all of them."""
    everyone: list[Mapping[str, T]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, entries)
    return dict(sorted((name, value) for rank in everyone for name, value in rank.items()))


def run_on_rank_zero(action: Callable[[], object]) -> None:
    """Run an action on rank 0 while the others wait; raise its error on all ranks."""
    outcome = [_error_of(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def run_everywhere(action: Callable[[], object]) -> None:
    """Run an action without collectives on every rank; raise the first failed rank's error on all."""
    outcomes: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _error_of(action))
    for rank, error in enumerate(outcomes):
        if error is not None:
            raise type(error)(f"rank {rank}: {error}")


def _error_of(action: Callable[[], object]) -> Exception | None:
    """Return an action's error as an MrlError; None if it succeeds."""
    try:
        action()
    except Exception as error:
        return error if isinstance(error, MrlError) else CheckpointError(repr(error))
    return None
