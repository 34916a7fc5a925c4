"""vLLM's block-wise float8 weights on any CPU. Changes nothing else of vLLM.

vLLM 0.32 offers its kernels (csrc/cpu/sgl-kernels/{gemm_fp8,moe_fp8}.cpp: bfloat16 activations) only to CPUs
with AMX. The same functions have an AVX512-BF16 path, slower but equally correct, as a test shows by
log-probs; vLLM is made to use it there. A CPU with neither lacks such functions in its build. There torch
computes the same and dequantises the weights at each use, so that weights take their narrow bytes on every
machine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mrl.models.kernels.float8 import dequantise_float8


def support_any_cpu() -> None:
    """Let workers serve block-wise float8; does nothing on a CPU where vLLM offers it."""
    if torch.cpu._is_amx_tile_supported():  # type: ignore[attr-defined]
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))  # type: ignore[assignment]
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)  # type: ignore[assignment]
    if not torch.cpu._is_avx512_bf16_supported():  # type: ignore[attr-defined]
        CPUFp8BlockScaledMMKernel.process_weights_after_loading = _keep  # type: ignore[method-assign,assignment]
        CPUFp8BlockScaledMMKernel.apply_weights = _linear  # type: ignore[method-assign]
        cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
        cpu_moe.CPUExpertsFp8.apply = _experts  # type: ignore[method-assign]


def _keep(self: Any, layer: torch.nn.Module) -> None:
    """Keep weights as in a folder or a weight sync, with exponent-only scales as float32. They become plain
    parameters: their loaders are not called again."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import _upcast_e8m0_to_fp32

    params = self._get_layer_params(layer)
    scales = params.block_scale.data
    if scales.dtype in (torch.float8_e8m0fnu, torch.uint8):
        scales = _upcast_e8m0_to_fp32(scales)
    for name, tensor in ((params.WEIGHT, params.weight.data), (params.block_scale_attr, scales)):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


def _linear(
    self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Map x [..., cols] to [..., rows] in x's dtype, summed in float32."""
    params = self._get_layer_params(layer)
    weight = dequantise_float8(params.weight, params.block_scale)
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def _experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *args: Any,
    **named: Any,
) -> None:
    """Write the weighted sum of each token's experts to output [n, H]: silu(gate) * up, then down. w1 [E, 2I,
    H], w2 [E, H, I]; hidden_states [n, H] bfloat16, topk_weights and topk_ids [n, k]."""
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        both = F.linear(hidden_states[token].float(), dequantise_float8(w1[expert], self.w1_scale[expert]))
        gate, up = both.chunk(2, -1)
        inner = (F.silu(gate) * up).to(hidden_states.dtype).float()  # as vLLM's kernel stores it
        down = F.linear(inner, dequantise_float8(w2[expert], self.w2_scale[expert]))
        total.index_add_(0, token, down * topk_weights[token, place, None].float())
    output.copy_(total)
