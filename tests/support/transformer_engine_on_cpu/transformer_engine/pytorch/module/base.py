"""Shared by all modules with weights: an empty extra state, and gradients of weights."""

from typing import Any

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a placeholder for a gradient that is already in `main_grad`; garbage unless `zero`."""
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


class TransformerEngineBaseModule(torch.nn.Module):
    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or not state.numel(), "float8 state in a checkpoint"


def initialise(
    weight: Tensor, init_method: Any, get_rng_state_tracker: Any, rng_tracker_name: str | None
) -> None:
    if get_rng_state_tracker is None:
        init_method(weight)
        return
    with get_rng_state_tracker().fork(*([rng_tracker_name] if rng_tracker_name else [])):
        init_method(weight)


def mark(parameter: Tensor, *, dim: int) -> None:
    """Mark a weight as tensor-parallel, parallel or not, like the real modules."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


class Product(torch.autograd.Function):
    """Computes x w^T; `fused` adds the gradient to the float32 `main_grad` and returns a dummy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused = weight, fused
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        rows, columns = grad.flatten(0, -2), x.flatten(0, -2)
        if not ctx.fused:
            return dx, rows.t() @ columns, None
        parameter = ctx.weight
        parameter.main_grad.addmm_(rows.t().float(), columns.float())
        parameter.grad_added_to_main_grad = True
        zero = getattr(parameter, "zero_out_wgrad", False)
        return dx, get_dummy_wgrad(list(parameter.shape), parameter.dtype, zero), None
