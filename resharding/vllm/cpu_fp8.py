"""vLLM's float8 kernels for CPUs, also on machines without AMX. Owns nothing else of vLLM.

vLLM 0.32 offers its block-wise float8 kernels (csrc/cpu/sgl-kernels/{gemm_fp8,moe_fp8}.cpp: bfloat16
activations) to CPUs with AMX only. The same functions have a way for AVX512-BF16, slower and as right, as a
test shows by log-probs. Here the two questions that vLLM asks get that answer.
"""

from __future__ import annotations

import torch


def served_here() -> bool:
    """Whether this machine's CPU runs vLLM's block-wise float8 kernels."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]


def allow_without_amx() -> None:
    """Lets vLLM choose them on this machine; does nothing where it does anyway, or where the machine cannot."""
    if torch.cpu._is_amx_tile_supported() or not served_here():  # type: ignore[attr-defined]
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))  # type: ignore[assignment]
        CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)  # type: ignore[assignment]
