"""Run causal attention and rotary embedding over packed sequences, with and without Transformer Engine.

Megatron's own unfused attention does not support packed sequences, and its unfused rotary embedding for them
loops over segments in Python. Here both process all segments at once; our own attention is
models/kernels/attention.py. Latent attention rotates its queries and keys itself (latent_attention.py) and
uses the rest. Transformer Engine's kernels get the same angles; only the core differs.

With context parallelism a rank has chunks of every segment (zigzag.py). Keys and values of all ranks are
gathered; the backward pass sums their gradients. The rank's queries then see whole segments, under a mask.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from mrl.models.kernels.attention import packed_attention
from mrl.models.kernels.rotary import rotate
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.megatron.layer_choice import LayerChoice
from mrl.models.megatron.packed_segments import PackedSegments


class _LastQueriesLast:
    """Mask type of Transformer Engine that Megatron's AttnMaskType lacks; Megatron reads its name."""

    name = "padding_causal_bottom_right"


_MEGATRONS_FIELDS = [part.name for part in dataclasses.fields(PackedSeqParams)]


class PackedCore(torch.nn.Module):
    """Core attention for Megatron's self attention: rotary embedding, then causal attention per segment.

    Latent attention's queries and keys arrive rotated, and its values are narrower.
    """

    bucketed: ClassVar[bool] = True
    """True if it reads PackedSegments.buckets."""

    def __init__(self, config: Any, layer_number: int) -> None:
        """`layer_number` counts the model's layers from 1, as Megatron passes it on every rank."""
        super().__init__()
        unrotated = config.no_rope_freq and config.no_rope_freq[layer_number - 1]
        self.rotates = not (config.multi_latent_attention or unrotated)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **kwargs: Any,
    ) -> Tensor:
        """Map query [N, H, D], key [N, G, D], value [N, G, V] to [N, H x V]; the mask is always None."""
        if self.rotates:
            query, key = self.rotate(query, key, packed_seq_params)
            if (factors := packed_seq_params.query_factors) is not None:
                query = (query * factors).to(query.dtype)
        return self.attend(query, key, value, packed_seq_params, **kwargs)

    def rotate(self, query: Tensor, key: Tensor, packed: PackedSegments) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions."""
        query, key = (rotate(x, packed.cos, packed.sin) for x in (query, key))
        return query, key

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        """Attend with rotated queries and keys."""
        raise NotImplementedError


class PackedAttention(PackedCore):
    """Attention on any device, with torch's own kernels (models/kernels/attention.py)."""

    def __init__(
        self, config: Any, *, layer_number: int, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.softmax_offset = _sinks(config) if config.softmax_type == "learnable" else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        buckets = packed.buckets
        assert buckets is not None, "the micro-batch was prepared for Transformer Engine's attention"
        if buckets.keys is not buckets.queries:
            key, value = _gather_ranks(key, value)
        return packed_attention(
            query, key, value, buckets, scale=self.scale, sinks=self.softmax_offset, windowed=self.windowed
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks of this rank's heads, if any, under Megatron's name."""
        group: Any = parallel_state.get_tensor_model_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class FusedPackedAttention(PackedCore):
    """Transformer Engine's THD kernels, for 16-bit types; not run on a GPU yet.

    Some backends do not support keys and values of two widths, depending on architecture and version:
    Megatron's latent attention pads values to the width of keys (multi_latent_attention.py) and trims the
    output. With context parallelism the kernels exchange keys and values between ranks themselves; they take
    this rank's chunks of every segment (zigzag.py) and the bounds of whole segments. Megatron passes the
    arguments of TEDotProductAttention.__init__.
    """

    bucketed = False

    def __init__(self, config: Any, *, layer_number: int, **kwargs: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config, layer_number)
        if "k_channels" in kwargs:
            kwargs["v_channels"] = max(kwargs["k_channels"], kwargs["v_channels"])
        self.core = TEDotProductAttention(config, layer_number=layer_number, **kwargs)

    def rotate(self, query: Tensor, key: Tensor, packed: PackedSegments) -> tuple[Tensor, Tensor]:
        """Rotate with Transformer Engine's kernel, in float32; a scaled embedding (YaRN) uses our code."""
        if packed.angles is None:
            return super().rotate(query, key, packed)
        from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb_thd

        cp = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        query, key = (
            fused_apply_rotary_pos_emb_thd(x, packed.cu_seqlens_q, packed.angles, *cp) for x in (query, key)
        )
        return query, key

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        segments = PackedSeqParams(**{name: getattr(packed, name) for name in _MEGATRONS_FIELDS})
        if packed.tree is not None and packed.tree.shares:
            key, value = (_after_prefixes(x, packed.tree) for x in (key, value))
            kwargs["attn_mask_type"] = _LastQueriesLast
        return self.core(query, key, value, None, packed_seq_params=segments, **kwargs)


def core_attention(choice: LayerChoice) -> type[PackedCore]:
    """Return Transformer Engine's attention or our own."""
    return FusedPackedAttention if choice.fused_attention else PackedAttention


def _sinks(config: Any) -> torch.nn.Parameter:
    """Return [own heads], the logarithm of what each head adds to its softmax denominators."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    values = torch.empty(config.num_attention_heads // ranks, dtype=config.params_dtype, device=device)
    sinks = torch.nn.Parameter(config.init_method(values) if config.perform_initialization else values)
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def _after_prefixes(tokens: Tensor, tree: SegmentTree) -> Tensor:
    """Return keys or values [M, G, D] of all segments, each after its prefix, from [N, G, D]."""
    parts = tokens.split(tree.lengths.tolist())
    order = [part for segment in range(len(parts)) for part in (*tree.prefix(segment), segment)]
    return torch.cat([parts[part] for part in order])


def _gather_ranks(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values [N, G, ...] of all context-parallel ranks in order; gradients are summed."""
    both: Any = torch.cat((key, value), dim=-1)
    gathered = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    return gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
