"""vLLM's experts on CPU, also spread over ranks. Changes nothing else of vLLM.

vLLM 0.32 spreads experts over ranks on every device, but on CPU two pieces are missing. Its expert kernels
receive the map from an expert's number to its place among the rank's own, and ignore it. And the exchange
around them under data parallelism (`AgRsAll2AllManager`: all tokens to all ranks, each rank's part of the
sums back) needs two collectives that the CPU communicator lacks. Both are added here; engines whose experts
are not spread are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def support_expert_parallel() -> None:
    """Let workers serve experts spread over ranks; a second call does nothing."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts

    if CpuCommunicator.all_gatherv is _all_gatherv:
        return
    for experts in (CPUUnquantizedExperts, CPUExpertsFp8):
        experts.apply = _by_own_numbers(experts.apply)  # type: ignore[method-assign]
    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign,assignment]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign,assignment]


def _by_own_numbers(apply: Callable[..., None]) -> Callable[..., None]:
    """Run the kernel on the rank's own experts: choices of other ranks' experts get weight 0."""

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
        *args: Any,
        **named: Any,
    ) -> None:
        if expert_map is not None:
            place = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights = topk_weights.masked_fill(place < 0, 0.0)
            topk_ids = place.clamp(min=0)
        chosen = (topk_weights, topk_ids, activation, global_num_experts, expert_map)
        apply(self, output, hidden_states, w1, w2, *chosen, *args, **named)

    return own


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Gather the rows of all ranks of the group in rank order, each [n_r, ...], into [sum of n, ...]; for a
    list, of every tensor."""
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
    """Sum [sum of n, ...] over the group's ranks, and return this rank's rows: [n_r, ...]."""
    _require_rows(dim)
    sizes = list(sizes or [len(input_) // self.world_size] * self.world_size)
    total = self.all_reduce(input_.clone(memory_format=torch.contiguous_format))
    return total.split(sizes)[self.rank_in_group].clone()


def _require_rows(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"dim {dim}: on CPU only rows can be exchanged (dim 0)")
