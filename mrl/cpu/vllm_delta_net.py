"""Delta nets of a vLLM engine on CPU in float32. Changes nothing else of vLLM.

vLLM 0.32 computes them on CPU only in bfloat16, and in the widths of its C++ kernels
(vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py). Here a float32 engine runs the rule in torch, as
a trainer without flash-linear-attention does; bfloat16 engines are unchanged.
"""

from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from mrl.models.kernels.buckets import positions
from mrl.models.kernels.delta_rule import (
    chunk_segments,
    gated_delta_rule,
    gated_delta_step,
    gates,
    short_convolution,
)

_bfloat16_core = gdn_attention.cpu_gdn_attention_core


def serve_float32() -> None:
    """Let delta nets take float32; call before a model is built."""
    gdn_attention.cpu_gdn_attention_core = delta_net_core


def delta_net_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Compute between a delta net's projections, for all requests' tokens of a step.

    mixed_qkv [n, channels], b, a [n, H] -> core_attn_out [n, H, V]. Convolution and rule continue from the
    states in the layer's cache, which are updated.
    """
    context: Any = get_forward_context()
    if mixed_qkv.dtype == torch.bfloat16:
        return _bfloat16_core(mixed_qkv, b, a, core_attn_out, layer_name)
    if context.attn_metadata is None:  # a profile run
        return None
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    step_of = context.attn_metadata[layer.prefix]
    count = step_of.num_decodes + step_of.num_prefills
    if not count:
        return None
    bounds = step_of.non_spec_query_start_loc[: count + 1].numpy()
    slots = step_of.non_spec_state_indices_tensor[:count].long()
    if step_of.has_initial_state is not None:
        _forget(layer.kv_cache, slots[~step_of.has_initial_state[:count]])
    mixed_qkv = _convolved(layer, mixed_qkv[: bounds[-1]], np.diff(bounds), slots)
    query, key, value = (x[0] for x in layer.rearrange_mixed_qkv(mixed_qkv))
    decay, beta = gates(a[: bounds[-1]], b[: bounds[-1]], layer.A_log, layer.dt_bias)
    cache = layer.kv_cache[1]
    cache = cache.view(*cache.shape[:2], key.shape[-1], value.shape[-1])
    if step_of.num_prefills:
        chunks = chunk_segments(np.diff(bounds), device=key.device)
        out, states = gated_delta_rule(query, key, value, decay, beta, chunks, cache[slots])
    else:
        out, states = gated_delta_step(query, key, value, decay, beta, cache[slots])
    cache[slots] = states.to(cache.dtype)
    core_attn_out[: len(out)] = out
    return None


def _forget(caches: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
    """Zero both states of new requests; their slots contain those of earlier requests."""
    for cache in caches:
        cache[slots] = 0


def _convolved(layer: Any, mixed: torch.Tensor, lengths: np.ndarray, slots: torch.Tensor) -> torch.Tensor:
    """Apply the short convolution, [n, channels]: requests' tokens follow the last ones of earlier steps."""
    cache = layer.kv_cache[0].mT if is_conv_state_dim_first() else layer.kv_cache[0]
    width = cache.shape[1]
    parts = mixed.split(lengths.tolist())
    longer = [torch.cat((earlier, part)) for earlier, part in zip(cache[slots], parts, strict=True)]
    cache[slots] = torch.stack([part[-width:] for part in longer]).to(cache.dtype)
    places = torch.from_numpy(positions(lengths + width))
    filters = layer.conv1d.weight.flatten(1)
    return short_convolution(torch.cat(longer), filters, places)[places >= width]
