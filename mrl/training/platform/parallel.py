"""Process groups of one training rank: the platform, torch.distributed and Megatron's parallel state.

Owns the start and the end of both, and the check that Megatron's coordinates are the layout's.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mrl.errors import CheckpointError, ConfigError, MrlError
from mrl.models.layout import Layout, Place
from mrl.training.platform import cpu


def start_process_groups(
    layout: Layout,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    seed: int,
    collective_seconds: float = 600.0,
) -> tuple[torch.device, Place]:
    """Join all ranks and build Megatron's groups. Every collective later fails after `collective_seconds`."""
    if world_size != layout.world_size:
        raise ConfigError(
            f"the layout needs {layout.world_size} ranks (tp x cp x dp x pp), but {world_size} were started"
        )
    device = _start_device(rank)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://{master_address}:{master_port}",
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
        distributed_timeout_minutes=max(1, int(collective_seconds / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    place = layout.place(rank)
    _check_place(place)
    return device, place


def _start_device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        cpu.install()
        return torch.device("cpu")
    # Not yet run on a GPU. The launcher makes one device visible per rank, or all of the node's.
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_place(place: Place) -> None:
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
    """Leave all groups; safe to call when none was started."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def max_over_world(value: int, *, device: torch.device) -> int:
    """The largest of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def run_on_rank_zero(action: Callable[[], object]) -> None:
    """Run on rank 0 while the others wait; its error is raised on all ranks."""
    outcome = [_error_of(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def run_everywhere(action: Callable[[], object]) -> None:
    """Run on every rank; the error of the first rank that has one is raised on all ranks. No collectives inside."""
    outcomes: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _error_of(action))
    for rank, error in enumerate(outcomes):
        if error is not None:
            raise type(error)(f"rank {rank}: {error}")


def _error_of(action: Callable[[], object]) -> Exception | None:
    """What the action raised, as an error of ours."""
    try:
        action()
    except Exception as error:
        return error if isinstance(error, MrlError) else CheckpointError(repr(error))
    return None
