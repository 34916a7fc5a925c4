"""Which of vLLM's modules a plan writes straight into the kernel's tensors, and what remains to be done with
them after.

Owns what is known of vLLM's processing; every other module is staged (`modules`): made anew, processed,
copied.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_KEEPS_LAYOUT = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods that leave a module's tensors as loaded, or take them away: their processing reads what it finds
there."""
_PLAIN_EXPERTS = (
    UnquantizedMoeBackend.CPU,
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
)
"""Kernels that take experts in the loader's order, or (CPU) pack them in a last step of their own."""


def is_direct(module: torch.nn.Module) -> bool:
    """The kernel's tensors have the loader's shapes, and processing finds the rows there: norms, embeddings,
    experts, and on GPUs every unquantised linear layer. Call it between the start of a reload and the
    module's first byte."""
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
    """The module leaves the reload with its kernel tensors as they are."""
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
    """Runs what a direct module's method builds beside its weights; experts need `pack_experts` too."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method) in _KEEPS_LAYOUT:
        method.process_weights_after_loading(module)


def pack_experts(module: torch.nn.Module) -> None:
    """vLLM 0.32 packs experts for its CPU kernel at the first load and not after a reload: without this call
    the loaded rows would be read as packed ones. Nothing to do for other modules and devices.

    Its own packing is run on one expert after the other: all at once it takes the module's size again, in
    fresh pages (48 MiB: 40 ms instead of 16)."""
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
