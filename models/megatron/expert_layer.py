"""Compute all experts of a rank in two matrix products: torch's grouped product on CPU and GPU, no
Transformer Engine.

Megatron's own forms need Transformer Engine or call one expert after another: with 128 experts a layer is
hundreds of small kernels. Here the rank's experts are two parameters with the rows of all experts, and tokens
arrive sorted by expert; models/kernels/experts.py does the computation. Routing and the exchange of tokens
are Megatron's. Checkpoints have the form of its sequential experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.errors import ConfigError
from mrl.models.kernels.experts import ALIGNED_BYTES, grouped_swiglu
from mrl.models.layout import divide


class GroupedExperts(MegatronModule):
    """SwiGLU experts e = 0..E-1 of one rank, in place of Megatron's SequentialMLP.

    `weight1` is [E * 2I, H]: per expert I rows of gate, then I of up; `weight2` is [E * H, I]. I is the
    expert's width divided by the expert-tensor-parallel size; H the hidden size.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = (
            pg_collection.ep,
            pg_collection.expt_tp,
            pg_collection.expt_dp,
        )
        hidden, dtype = config.hidden_size, config.params_dtype
        assert config.moe_ffn_hidden_size is not None
        self.inner = divide(config.moe_ffn_hidden_size, self.tp_group.size(), name="expert width over etp")
        for quantity, size in (("hidden size", hidden), ("expert width on a rank", self.inner)):
            if size * dtype.itemsize % ALIGNED_BYTES:
                raise ConfigError(
                    f"{quantity} {size} in {dtype} must span a multiple of {ALIGNED_BYTES} bytes for "
                    "grouped products"
                )
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight1 = _weight(num_local_experts * 2 * self.inner, hidden, dtype, device, dim=0)
        self.weight2 = _weight(num_local_experts * hidden, self.inner, dtype, device, dim=1)
        if config.perform_initialization:
            config.init_method(self.weight1)  # type: ignore[misc]
            config.output_layer_init_method(self.weight2)  # type: ignore[misc]

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map hidden [n, H] sorted by expert, tokens_per_expert [E], probs [n] to weighted [n, H]."""
        first = self.weight1.view(self.num_local_experts, 2 * self.inner, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.inner)
        return grouped_swiglu(hidden, first, second, tokens_per_expert, probs), None

    def backward_dw(self) -> None:
        """Do nothing: Megatron's experts may defer weight gradients, these do not."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return keys, shapes [..., experts, rows, columns] and offsets of Megatron's sequential experts."""
        shards, replica = {}, (0, 0, self.dp_group.rank())
        for name, (stored, halves) in self._stored_as().items():
            parameter = self.get_parameter(name)
            build: Any = functools.partial(self._shards, offsets=sharded_offsets, halves=halves)
            merge: Any = functools.partial(_merged, shape=tuple(parameter.shape))
            key = f"{prefix}experts.{stored}"
            shards[f"{prefix}{name}"] = ShardedTensorFactory(key, parameter, build, merge, replica)
        return shards

    def _stored_as(self) -> dict[str, tuple[str, int]]:
        """Return parameter -> (checkpoint name, parts to split of an expert's rows; 0: split last axis)."""
        return {"weight1": ("linear_fc1.weight", 2), "weight2": ("linear_fc2.weight", 0)}

    @torch.no_grad()
    def _shards(
        self,
        key: str,
        weight: Tensor,
        replica_id: Any,
        flattened_range: slice | None,
        *,
        offsets: tuple[Any, ...],
        halves: int,
    ) -> list[ShardedTensor]:
        """Shard a parameter or optimizer state; gate and up are separate in the global tensor."""
        assert flattened_range is None, "flattened shards belong to other optimizer formats"
        experts, axis = weight.view(self.num_local_experts, -1, *weight.shape[1:]), len(offsets)
        parts, rank = self.tp_group.size(), self.tp_group.rank()
        cut = [(axis + 1, part * parts + rank, parts * halves) for part in range(halves)]
        cut = cut or [(axis + weight.dim(), rank, parts)]
        return [
            ShardedTensor.from_rank_offsets(
                key,
                piece,
                *offsets,
                (axis, self.ep_group.rank(), self.ep_group.size()),
                place,
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for piece, place in zip(experts.chunk(max(halves, 1), dim=1), cut, strict=True)
        ]


def _merged(pieces: list[Tensor], *, shape: tuple[int, ...]) -> Tensor:
    return torch.cat(pieces, dim=1).reshape(shape)


def _weight(
    rows: int, columns: int, dtype: torch.dtype, device: int | None, *, dim: int
) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
    return weight
