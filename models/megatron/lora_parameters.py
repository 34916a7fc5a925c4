"""Low-rank adapters in Megatron's model chunks: their parameters, and how they change and follow the frozen ones.

No layer knows of them. Whenever the model runs, the frozen parameter holds W + scale B A, rounded to its type as
a weight of full training is: log-probs are those of the very weights that engines get. In the backward pass its
gradient dW becomes dA = scale B^T dW and dB = scale dW A^T at once, and is dropped. So adapters are the same for
every kind of layer and every split of it.
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
        """A's start depends on `seed` and its names outside alone, so that it is the same in every layout."""
        super().__init__()
        self.adapter, self.scale = adapter, scale
        self._taken: Callable[[Tensor], None] | None = None
        self._base = (base,)  # else it would be a parameter of this module
        self.a: Any = torch.nn.Parameter(_start(adapter.a, seed).to(base.device, base.dtype))
        self.b: Any = torch.nn.Parameter(base.new_zeros(adapter.b.tensor.shape))
        self._mark(self.a, adapter.a, dim=1)
        self._mark(self.b, adapter.b, dim=0)

    @property
    def base(self) -> torch.nn.Parameter:
        """The parameter that is changed."""
        return self._base[0]

    @torch.no_grad()
    def merge(self) -> None:
        """Adds scale B A to the base; an expert at a time, so that float32 copies are small."""
        for base, a, b in zip(*map(self._slabs, (self.base, self.a, self.b)), strict=True):
            base.copy_(merged(base, a, b, scale=self.scale))

    def follow_gradients(self, taken: Callable[[Tensor], None] | None = None) -> None:
        """From now on a gradient of the base is one of A and B, of which `taken` then hears. To be called once the optimizer
        is made, which must not take the base for trained."""
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
        """A view of each expert's rows of a stack; of all rows where it is none."""
        return tensor.detach().chunk(self.adapter.slabs)

    def _mark(self, parameter: Any, half: Half, *, dim: int) -> None:
        """Says how Megatron sums the gradient and counts its norm.

        Of what is not split every tensor-parallel rank has a part of the gradient, its rows' or its tokens', as of
        a norm's weight under sequence parallelism.
        """
        if self.adapter.is_routed:
            parameter.allreduce = False  # as build.mark_expert_parameters has it
        if half.is_split or self.adapter.is_routed:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
        else:
            parameter.sequence_parallel = True

    def sharded(self) -> dict[str, ShardedTensorFactory]:
        """Both as the checkpoint tensors' own pairs, whole under their names outside, whatever the layout."""
        halves = ((self.a, self.adapter.a), (self.b, self.adapter.b))
        return {half.tensor.name: _factory(parameter, half) for parameter, half in halves}


def add_adapters(
    models: list[Any], adapters: Iterable[Adapter], *, scale: float, seed: int
) -> list[LowRankPair]:
    """Freezes the chunks and gives them adapters, before they are wrapped for data parallelism.

    The embedding's output asks for a gradient: recomputed activations would have none otherwise.
    """
    known = [model.weights() for model in models]
    for model in models:
        model.requires_grad_(False)
        model.adapters = torch.nn.ModuleList()
        if model.pre_process:
            model.embedding.register_forward_hook(_ask_for_gradient)
    pairs = []
    for adapter in adapters:
        pair = LowRankPair(adapter, known[adapter.chunk][adapter.parameter], scale=scale, seed=seed)
        models[adapter.chunk].adapters.append(pair)
        pairs.append(pair)
    return pairs


def _ask_for_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _start(half: Half, seed: int) -> Tensor:
    """This rank's part of A before training, float32."""
    start = torch.empty(half.tensor.shape)
    for piece in half.tensor.pieces:
        key = hashlib.sha256(f"{seed} {piece.tensor}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        rank, columns = half.stored[piece.tensor]
        whole = (2 * torch.rand(rank, columns, generator=generator) - 1) / columns**0.5
        first, own = piece.start[1], piece.local_start[0]
        start[own : own + rank] = whole[:, first : first + piece.shape[1]]
    return start


def _factory(parameter: Tensor, half: Half) -> ShardedTensorFactory:
    build: Any = functools.partial(_shards, half)
    merge: Any = None  # what is loaded is loaded in place
    return ShardedTensorFactory(half.tensor.name, parameter, build, merge, half.replica)


def _shards(
    half: Half, key: str, values: Tensor, replica_id: Any, flattened_range: slice | None
) -> list[ShardedTensor]:
    """A parameter, or an optimizer state of its shape, as boxes of the stored tensors."""
    assert flattened_range is None, "flattened shards are of other optimizer formats"
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
