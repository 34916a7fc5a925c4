"""Kernels and collectives that vLLM lacks on CPU; workers install them through resharding/vllm/plugin.py."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform


def install_kernels() -> None:
    """Add them to vLLM's classes in this process, before a model is built; does nothing on other devices."""
    if not current_platform.is_cpu():
        return
    from mrl.cpu import vllm_delta_net, vllm_experts, vllm_float8, vllm_router

    request_amx_tiles()
    vllm_float8.support_any_cpu()
    vllm_delta_net.serve_float32()
    vllm_router.allow_sigmoid_without_groups()
    vllm_experts.support_expert_parallel()


def request_amx_tiles() -> None:
    """Request AMX tiles from the kernel, which grants them to processes that ask.

    vLLM 0.32's bfloat16 attention uses them and relies on oneDNN's request. A model of small weights (below 1
    MiB) never calls oneDNN: its workers died of SIGILL.
    """
    torch.cpu._init_amx()  # type: ignore[attr-defined]
