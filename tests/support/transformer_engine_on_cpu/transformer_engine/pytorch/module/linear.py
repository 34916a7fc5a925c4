"""Linear layers: alone, after a norm, and grouped; split by Megatron's tensor-parallel collectives."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from transformer_engine.pytorch.module.base import Product, TransformerEngineBaseModule, initialise, mark

DIMENSION = {"column": 0, "row": 1, None: 0}
"""The dimension of a weight that a parallel mode splits."""


class Linear(TransformerEngineBaseModule):
    save_original_input = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        initialise(self.weight.data, init_method, get_rng_state_tracker, rng_tracker_name)
        mark(self.weight, dim=DIMENSION[parallel_mode])
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype, device=device))
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            else:
                mark(self.bias, dim=0)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """Return the output [*, out], with the bias if it is returned and not added."""
        out = self._leave(Product.apply(self._enter(inp), self.weight, self._fused()))
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias

    def _fused(self) -> bool:
        return self.fuse_wgrad_accumulation and self.weight.requires_grad and torch.is_grad_enabled()

    def _enter(self, x: Tensor) -> Tensor:
        """Gather the input of all tokens if the output is split."""
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _leave(self, y: Tensor) -> Tensor:
        """Sum the ranks' outputs if the input is split."""
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )
        assert normalization == "RMSNorm" and not return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        return super().forward(functional.rms_norm(inp, weight.shape, weight, self.eps))


class GroupedLinear(TransformerEngineBaseModule):
    save_original_input = False

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_name: str | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        assert not single_grouped_weight and not single_grouped_bias
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self.single_grouped_weight = self.single_grouped_bias = False
        for number in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            initialise(weight, init_method, get_rng_state_tracker, rng_tracker_name)
            parameter = torch.nn.Parameter(weight)
            mark(parameter, dim=DIMENSION[parallel_mode])
            self.register_parameter(f"weight{number}", parameter)
        for number in range(num_gemms if bias else 0):
            zeros = torch.zeros(out_features, dtype=params_dtype, device=device)
            self.register_parameter(f"bias{number}", torch.nn.Parameter(zeros))

    def forward(
        self, inp: Tensor, m_splits: list[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Return the outputs [N, out], with the experts' biases if they are returned and not added."""
        sizes = [int(size) for size in m_splits]
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        outputs = [
            Product.apply(part, self.get_parameter(f"weight{number}"), fused)
            for number, part in enumerate(inp.split(sizes))
        ]
        biases = [self.get_parameter(f"bias{number}") for number in range(self.num_gemms * self.use_bias)]
        if self.return_bias:
            return torch.cat(outputs), biases
        return torch.cat(
            [out + bias for out, bias in zip(outputs, biases, strict=True)] if biases else outputs
        )
