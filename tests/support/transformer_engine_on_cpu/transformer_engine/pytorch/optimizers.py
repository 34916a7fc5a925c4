"""FusedAdam with the real one's state, and the multi-tensor operations of gradient clipping."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def multi_tensor_applier(
    op: Any, noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
) -> Any:
    return op(65536, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, None]:
    assert not per_tensor
    return torch.stack([x.float().norm() for x in tensor_lists[0]]).norm()[None], None


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


class FusedAdam(torch.optim.Optimizer):
    """AdamW with a step count per group; states are made at the first step, in the given dtypes."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert not amsgrad and not capturable and bias_correction and adam_w_mode
        if store_param_remainders:
            raise NotImplementedError("the stand-in keeps whole master weights")
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = False
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            setattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().to(self.name_to_dtype_map["master_param"])

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        state = self.state[param][state_name]
        return state if state.dtype == torch.float32 else state.float()

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        dtype = self.name_to_dtype_map[state_name]
        state = self.state[param].setdefault(state_name, torch.empty_like(param, dtype=dtype))
        state.copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """Return all states in float32."""
        result = super().state_dict()
        for state in result["state"].values():
            state.update({name: value.float() for name, value in state.items()})
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = {}
            for name, value in state.items():
                self.set_scaled_state(parameters[number], name, value.float())

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter, False)
        grad = getattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)
        if grad is None:
            return
        state, grad = self.state[parameter], grad.float()
        (beta1, beta2), count = group["betas"], group["step"]
        first = self.get_unscaled_state(parameter, "exp_avg").lerp(grad, 1 - beta1)
        second = self.get_unscaled_state(parameter, "exp_avg_sq") * beta2 + grad * grad * (1 - beta2)
        weight = (state["master_param"] if self.master_weights else parameter).float()
        denominator = (second / (1 - beta2**count)).sqrt() + group["eps"]
        update = first / (1 - beta1**count) / denominator + group["weight_decay"] * weight
        weight = weight - group["lr"] * update
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        parameter.copy_(weight)
        if self.master_weights:
            state["master_param"].copy_(weight)


class FusedSGD(torch.optim.Optimizer):
    """Unused by runs."""
