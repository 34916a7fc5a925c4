"""vLLM's experts on CPU, also where each rank has some of them whole. Owns nothing else of vLLM.

vLLM 0.32 deals experts out over ranks on every device, and on CPU two pieces are missing. Its expert kernels are
handed the map from an expert's number to its place among the rank's own, and do not look at it. And the exchange
around them under data parallel (`AgRsAll2AllManager`: all tokens to all ranks, each rank's part of the sums back)
asks the communicator for two collectives that the one for CPUs lacks. Here both are added; where an engine's experts
are not dealt out nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def deal_out() -> None:
    """Let workers serve experts that are dealt out over ranks; a second call does nothing."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts

    if CpuCommunicator.all_gatherv is _all_gatherv:
        return
    for experts in (CPUUnquantizedExperts, CPUExpertsFp8):
        experts.apply = _by_own_numbers(experts.apply)  # type: ignore[method-assign]
    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign,assignment]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign,assignment]


def _by_own_numbers(apply: Callable[..., None]) -> Callable[..., None]:
    """The kernel on the rank's own experts: a token's choice of another rank's counts nothing here (weight 0)."""

    @functools.wraps(apply)
    def own(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        if expert_map is not None:
            place = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights = topk_weights.masked_fill(place < 0, 0.0)
            topk_ids = place.clamp(min=0)
        chosen = (topk_weights, topk_ids, activation, global_num_experts, expert_map)
        apply(self, output, hidden_states, w1, w2, *chosen, *rest, **named)

    return own


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """The rows of all ranks of the group, rank after rank: [n_r, ...] of each to [sum of n, ...]; of every tensor
    where a list is given."""
    if isinstance(input_, list | tuple):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    _require_rows(dim)
    sizes = list(sizes or [len(input_)] * self.world_size)
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = self.all_gather(padded, dim=0).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """The sum over the group's ranks of [sum of n, ...], of which each keeps its own rows: [n_r, ...]."""
    _require_rows(dim)
    sizes = list(sizes or [len(input_) // self.world_size] * self.world_size)
    total = self.all_reduce(input_.clone(memory_format=torch.contiguous_format))
    return total.split(sizes)[self.rank_in_group].clone()


def _require_rows(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"on CPU rows alone are exchanged (dim 0), not dim {dim}")
