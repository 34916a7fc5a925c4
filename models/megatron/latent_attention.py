"""Run multi-head latent attention (arXiv 2405.04434) over packed sequences: Megatron's module, our rotary
embedding.

Megatron's own method rotates each segment in a Python loop with a separate table. With split down-projections
it also omits the other ranks' heads from the gradient of the keys' rotary part. packed_attention.py has the
core attention.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mrl.models.kernels.rotary import rotate_pairs
from mrl.models.megatron.packed_segments import PackedSegments


class PackedLatentAttention(MLASelfAttention):
    """Queries, keys and values of all segments at once; projections, norms and output are Megatron's."""

    q_layernorm: Any
    kv_layernorm: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb  # the micro-batch has its own cosines and sines
        self._splits_down = isinstance(self.linear_kv_down_proj, ColumnParallelLinear)
        """True if down-projections are split by rows. Transformer Engine's are whole on every rank and
        applied to its own tokens, and their norms are part of the up-projections."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Use the spec's modules if queries are not compressed: they have no norm then, but Megatron 0.19
        would fuse one into their projection."""
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedSegments | None = None,
        inference_context: None = None,
        *,
        inference_params: None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Project hidden_states [N / tp, 1, hidden] to query, key [N, H, nope + rope] and value [N, H, v] of
        this rank's H heads, followed by the two compressed forms that only Megatron's inference uses."""
        assert packed_seq_params is not None, "latent attention needs packed sequences"
        config, cos, sin = self.config, packed_seq_params.cos, packed_seq_params.sin
        q_latent = self._query_latent(hidden_states)
        kv_latent, k_rope = self._key_value_latent(hidden_states)

        up_q = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query, kv = self._by_head(up_q(q_latent)[0]), self._by_head(self.linear_kv_up_proj(kv_latent)[0])
        q_plain, q_rope = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        k_plain, value = kv.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        q_rope = rotate_pairs(q_rope, cos, sin)
        k_rope = rotate_pairs(k_rope, cos, sin).expand(-1, kv.shape[1], -1)
        query, key = torch.cat((q_plain, q_rope), -1), torch.cat((k_plain, k_rope), -1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _by_head(self, x: Tensor) -> Tensor:
        """Convert [N, 1, H x D] to [N, H, D]."""
        return x.view(x.shape[0], self.num_attention_heads_per_partition, -1)

    def _query_latent(self, hidden: Tensor) -> Tensor:
        """Return [N / tp, 1, q_lora_rank], normed if the norm is a module; else the hidden states."""
        if self.config.q_lora_rank is None:
            return hidden
        latent = self.linear_q_down_proj(hidden)[0]
        return self.q_layernorm(self._own_tokens(_gather(latent)) if self._splits_down else latent)

    def _key_value_latent(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N / tp, 1, kv_lora_rank], normed if the norm is a module, and the keys' rotary part [N, 1,
        rope], which all heads share.

        Each rank rotates that part for its own heads; the ranks' gradients are summed.
        """
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        down = self.linear_kv_down_proj(hidden)[0]
        if not self._splits_down:
            latent, k_rope = down.split(sizes, dim=-1)
            if self.config.sequence_parallel:
                k_rope = gather_from_sequence_parallel_region(k_rope)
            return self.kv_layernorm(latent), k_rope
        latent, k_rope = _gather(down).split(sizes, dim=-1)
        return self.kv_layernorm(self._own_tokens(latent)), copy_to_tensor_model_parallel_region(k_rope)

    def _own_tokens(self, x: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x


def _gather(columns: Tensor) -> Tensor:
    """Gather [N, 1, C / tp] of a row-split projection to [N, 1, C]."""
    return gather_from_tensor_model_parallel_region(columns)
