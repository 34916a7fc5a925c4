"""Add LoRA adapters to Megatron's model chunks: their parameters, and how they and the frozen ones interact.

Layers do not know of them. Whenever the model runs, the frozen parameter contains W + scale B A, rounded to
its type as in full training, so log-probs are those of exactly the weights that engines get. In the backward
pass its gradient dW is converted to dA = scale B^T dW and dB = scale dW A^T at once, and freed. So adapters
are the same for every kind of layer and every split of it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from mrl.models.adapters import Adapter, Half
from mrl.models.kernels.low_rank import merged


class LowRankPair(torch.nn.Module):
    """A and B of one parameter, the base. A starts uniform in +-1 / sqrt(columns), as in PEFT, and B at 0."""

    def __init__(self, adapter: Adapter, base: torch.nn.Parameter, *, scale: float, seed: int) -> None:
        """A's start depends only on `seed` and its stored names, so it is the same in every layout."""
        super().__init__()
        self.adapter, self.scale = adapter, scale
        self._taken: Callable[[Tensor], None] | None = None
        self._base = (base,)  # a tuple, so that it is not a parameter of this module
        self.a: Any = torch.nn.Parameter(_start(adapter.a, seed).to(base.device, base.dtype))
        self.b: Any = torch.nn.Parameter(base.new_zeros(adapter.b.tensor.shape))
        self._mark(self.a, adapter.a, dim=1)
        self._mark(self.b, adapter.b, dim=0)

    @property
    def base(self) -> torch.nn.Parameter:
        """The parameter that the adapter changes."""
        return self._base[0]

    @torch.no_grad()
    def merge(self) -> None:
        """Add scale B A to the base, one expert at a time to keep float32 copies small."""
        for base, a, b in zip(*map(self._slabs, (self.base, self.a, self.b)), strict=True):
            base.copy_(merged(base, a, b, scale=self.scale))

    def follow_gradients(self, taken: Callable[[Tensor], None] | None = None) -> None:
        """Convert gradients of the base to those of A and B from now on, and call `taken` with both.

        Call it after the optimizer is made, which must not treat the base as trained.
        """
        self._taken = taken
        self.base.requires_grad_(True)
        self.base.register_post_accumulate_grad_hook(self._take_gradient)

    @torch.no_grad()
    def _take_gradient(self, base: Tensor) -> None:
        gradient, base.grad = base.grad, None
        assert gradient is not None
        parts = (gradient, self.a, self.b, self.a.main_grad, self.b.main_grad)
        for dw, a, b, sum_a, sum_b in zip(*map(self._slabs, parts), strict=True):
            sum_a.add_(torch.mm(b.t(), dw), alpha=self.scale)
            sum_b.add_(torch.mm(dw, a.t()), alpha=self.scale)
        if self._taken is not None:
            self._taken(self.a)
            self._taken(self.b)

    def _slabs(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return a view of each expert's rows of a stack, or of all rows if it is not a stack."""
        return tensor.detach().chunk(self.adapter.num_pairs)

    def _mark(self, parameter: Any, half: Half, *, dim: int) -> None:
        """Set how Megatron sums the gradient and counts its norm.

        If the half is not split, every tensor-parallel rank has a part of the gradient (of its rows or
        tokens), as for a norm's weight under sequence parallelism.
        """
        if self.adapter.is_routed:
            parameter.allreduce = False  # as build.mark_expert_parameters does
        if half.is_split or self.adapter.is_routed:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
        else:
            parameter.sequence_parallel = True

    def sharded(self) -> dict[str, ShardedTensorFactory]:
        """Return both halves as the checkpoint tensors' own pairs, whole under PEFT names in any layout."""
        halves = ((self.a, self.adapter.a), (self.b, self.adapter.b))
        return {half.tensor.name: _factory(parameter, half) for parameter, half in halves}


def add_adapters(
    models: list[Any], adapters: Iterable[Adapter], *, scale: float, seed: int
) -> list[LowRankPair]:
    """Freeze the chunks and add adapters, before they are wrapped for data parallelism.

    The embedding's output requires a gradient; otherwise recomputed activations would have none.
    """
    weights = [model.weights() for model in models]
    for model in models:
        model.requires_grad_(False)
        model.adapters = torch.nn.ModuleList()
        if model.pre_process:
            model.embedding.register_forward_hook(_ask_for_gradient)
    pairs = []
    for adapter in adapters:
        pair = LowRankPair(adapter, weights[adapter.chunk][adapter.parameter], scale=scale, seed=seed)
        models[adapter.chunk].adapters.append(pair)
        pairs.append(pair)
    return pairs


def _ask_for_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _start(half: Half, seed: int) -> Tensor:
    """Return this rank's part of the initial A, float32."""
    start = torch.empty(half.tensor.shape)
    for piece in half.tensor.pieces:
        key = hashlib.sha256(f"{seed} {piece.tensor}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        rank, columns = half.stored[piece.tensor]
        whole = (2 * torch.rand(rank, columns, generator=generator) - 1) / columns**0.5
        first, row = piece.start[1], piece.local_start[0]
        start[row : row + rank] = whole[:, first : first + piece.shape[1]]
    return start


def _factory(parameter: Tensor, half: Half) -> ShardedTensorFactory:
    build: Any = functools.partial(_shards, half)
    merge: Any = None  # loading is in place
    return ShardedTensorFactory(half.tensor.name, parameter, build, merge, half.replica)


def _shards(
    half: Half, key: str, values: Tensor, replica_id: Any, flattened_range: slice | None
) -> list[ShardedTensor]:
    """Shard a parameter, or an optimizer state of its shape, into boxes of the stored tensors."""
    assert flattened_range is None, "flattened shards belong to other optimizer formats"
    shards = []
    for piece in half.tensor.pieces:
        box = tuple(slice(at, at + size) for at, size in zip(piece.local_start, piece.shape, strict=True))
        shards.append(
            ShardedTensor(
                key=piece.tensor,
                data=values[box],
                dtype=values.dtype,
                local_shape=piece.shape,
                global_shape=half.stored[piece.tensor],
                global_offset=piece.start,
                axis_fragmentations=None,
                replica_id=replica_id,
            )
        )
    return shards
