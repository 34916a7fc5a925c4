"""What all modules with weights share: an extra state that is empty without float8, and how a weight gets its gradient."""

from typing import Any

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What stands for a gradient that lies in `main_grad` already; garbage unless `zero`."""
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
    """Fills a weight, from the random states that Megatron keeps for it."""
    if get_rng_state_tracker is None:
        init_method(weight)
        return
    with get_rng_state_tracker().fork(*([rng_tracker_name] if rng_tracker_name else [])):
        init_method(weight)


def mark(parameter: Tensor, *, dim: int) -> None:
    """Marks a weight as tensor-parallel, parallel or not, as the real modules do."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


class Product(torch.autograd.Function):
    """x w^T; with `fused`, the weight's gradient is added to its float32 `main_grad` and a dummy is returned."""

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
