"""vLLM modules that a plan writes straight into the kernel's tensors, and their remaining processing.

Knows vLLM's processing. Every other module is staged (`modules`): materialised anew, processed, copied.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_KEEPS_LAYOUT = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods that leave a module's tensors as loaded, or remove them: their processing reads them in place."""
_PLAIN_EXPERTS = (
    UnquantizedMoeBackend.CPU,
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
)
"""Kernels that take experts in the loader's order, or (CPU) pack them in a last step."""


def is_direct(module: torch.nn.Module) -> bool:
    """Return True if the kernel's tensors have the loader's shapes and processing reads them in place.

    True for norms, embeddings, experts, and on GPUs every unquantised linear layer. Call it between the start
    of a reload and the module's first byte."""
    info = get_layerwise_info(module)
    if info.kernel_tensors is None or hasattr(module, "process_weights_after_loading"):
        return False
    if not _processed_in_place(module):
        return False
    kernel, loader = info.kernel_tensors[0], dict(module.named_parameters(recurse=False))
    return all(
        name in loader
        and k.shape == loader[name].shape
        and k.dtype == loader[name].dtype
        and k.is_contiguous()
        for name, k in kernel.items()
    )


def restore(module: torch.nn.Module) -> None:
    """Put a module's kernel tensors back and take it out of the reload."""
    info = get_layerwise_info(module)
    if info.kernel_tensors is not None:
        parameters, buffers = info.kernel_tensors
        for name in [*module._parameters, *module._buffers]:
            if getattr(module, name, None) is not None:
                delattr(module, name)
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)  # type: ignore[arg-type]
        for name, buffer in buffers.items():
            module.register_buffer(name, buffer, persistent=name not in info.kernel_non_persistent_buffers)
    info.reset()


def process(module: torch.nn.Module) -> None:
    """Build what a direct module's method derives from its weights; experts also need `pack_experts`."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method) in _KEEPS_LAYOUT:
        method.process_weights_after_loading(module)


def pack_experts(module: torch.nn.Module) -> None:
    """Pack experts for vLLM's CPU kernel; do nothing for other modules and devices.

    vLLM 0.32 packs them at the first load but not after a reload, and would read the loaded rows as packed
    ones. Its packing runs on one expert at a time: all at once take the module's size again, in fresh pages
    (48 MiB: 40 ms instead of 16)."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    weights = {n: p for n, p in module.named_parameters(recurse=False) if n in ("w13_weight", "w2_weight")}
    if kernel is None or not weights or any(w.device.type != "cpu" for w in weights.values()):
        return
    for expert in range(len(weights["w13_weight"])):
        rows = {name: w.data[expert : expert + 1] for name, w in weights.items()}
        alone = torch.nn.Module()
        for name, row in rows.items():
            alone.register_parameter(name, torch.nn.Parameter(row, requires_grad=False))
        kernel.fused_experts.process_weights_after_loading(alone)
        for name, row in rows.items():
            packed = getattr(alone, name)
            if packed.data_ptr() != row.data_ptr():
                row.copy_(packed)


def _processed_in_place(module: torch.nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if type(method) is UnquantizedFusedMoEMethod:
        return method.unquantized_backend in _PLAIN_EXPERTS
    return method is None or type(method) in _KEEPS_LAYOUT
