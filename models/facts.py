"""Derive a model's size from its config.json: exact counts, sizes per layer, FLOPs. Reads no weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from mrl.models.delta_net import delta_net
from mrl.models.families import family_of
from mrl.models.family import Family
from mrl.models.hf_config import field, head_dim
from mrl.models.tensors import TRANSFORMER_ENGINE, ParameterRows

_EXPERTS = "mlp.experts."
"""Prefix of the names of routed experts' rows."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Sizes of one model, from its config.json."""

    hf: dict[str, Any]
    origin: str
    """Source of the configuration."""

    @property
    def family(self) -> Family:
        return family_of(self.hf)

    @property
    def num_layers(self) -> int:
        return field(self.hf, "num_hidden_layers")

    @property
    def hidden(self) -> int:
        return field(self.hf, "hidden_size")

    @property
    def vocab(self) -> int:
        return field(self.hf, "vocab_size")

    @property
    def num_heads(self) -> int:
        return field(self.hf, "num_attention_heads")

    @property
    def num_experts(self) -> int:
        return self.family.num_experts(self.hf)

    @property
    def top_k(self) -> int:
        """Routed experts per token."""
        return field(self.hf, "num_experts_per_tok") if self.num_experts else 0

    @functools.cached_property
    def moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(self.family.is_moe_layer(self.hf, number) for number in range(self.num_layers))

    @property
    def expert_inner(self) -> int:
        """Inner width of one routed expert; 0 without experts."""
        return field(self.hf, "moe_intermediate_size", "intermediate_size") if self.num_experts else 0

    @functools.cached_property
    def delta_nets(self) -> int:
        """Number of layers with a gated delta net instead of attention."""
        return self.family.num_delta_nets(self.hf)

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention over all earlier tokens."""
        return self.num_layers - self.delta_nets

    @property
    def latent_attention(self) -> bool:
        return "kv_lora_rank" in self.hf

    @property
    def kv_heads(self) -> int:
        return field(self.hf, "num_key_value_heads")

    @property
    def kv_elements_per_token(self) -> int:
        """KV cache elements per token and layer, over all heads; latent attention caches a single row."""
        if self.latent_attention:
            return self.hf["kv_lora_rank"] + self.hf["qk_rope_head_dim"]
        return 2 * self.kv_heads * head_dim(self.hf)

    @property
    def score_width(self) -> int:
        """Key width plus value width of one query head: attention costs 2 x heads x this per pair."""
        if self.latent_attention:
            return self.hf["qk_nope_head_dim"] + self.hf["qk_rope_head_dim"] + self.hf["v_head_dim"]
        return 2 * head_dim(self.hf)

    @functools.cached_property
    def _counts(self) -> tuple[int, int]:
        """(elements of the checkpoint, those in routed experts)."""
        rows = [row for layer in self.layers for row in layer]
        tables = 1 if self.hf.get("tie_word_embeddings", False) else 2
        total, routed = tables * self.vocab * self.hidden + self.hidden, 0
        for row in rows:
            size = sum(s.rows for block in row.blocks for s in block) * math.prod(row.trailing)
            size *= self.copies(row)
            total += size
            routed += size * row.name.startswith(_EXPERTS)
        return total, routed

    @property
    def parameters_total(self) -> int:
        """Elements of the checkpoint, with router correction biases, without prediction (MTP) layers."""
        return self._counts[0]

    @property
    def parameters_routed(self) -> int:
        """Elements of all routed experts."""
        return self._counts[1]

    @property
    def parameters_active(self) -> int:
        """Elements used per token: all but the routed experts that it does not visit."""
        visited = self.parameters_routed * self.top_k // self.num_experts if self.num_experts else 0
        return self.parameters_total - self.parameters_routed + visited

    @functools.cached_property
    def layers(self) -> list[list[ParameterRows]]:
        """Rows of each layer with only its first expert, of which there are `copies`."""
        experts = range(min(1, self.num_experts))
        return [self.family.layer(self.hf, n, TRANSFORMER_ENGINE, experts) for n in range(self.num_layers)]

    def copies(self, row: ParameterRows) -> int:
        """Return how many equal rows one row of `layers` stands for: all experts have the same size."""
        return self.num_experts if row.name.startswith(_EXPERTS) else 1

    def forward_flops(self, tokens: float, pairs: float, *, has_head: bool = True) -> float:
        """Return the FLOPs of one forward pass over `tokens`, whose queries see `pairs` keys per layer; a
        backward pass costs two more.

        Two per parameter that a token is multiplied with (of experts, only the visited ones). Two per
        attention pair, head, and width of key and value: PaLM, arXiv 2204.02311, appendix B, but with only
        the pairs of a causal mask (half of each sequence's squared length). The embedding is a lookup. A
        token reads, writes and outputs from a delta net's states, two operations per element each. `has_head`
        counts the output layer.
        """
        matrix = self.vocab * self.hidden
        lookups = matrix * (not self.hf.get("tie_word_embeddings", False)) + matrix * (not has_head)
        scores = 2 * self.attention_layers * self.num_heads * self.score_width * pairs
        states = 6 * self.delta_nets * delta_net(self.hf).state_elements * tokens if self.delta_nets else 0
        return 2 * (self.parameters_active - lookups) * tokens + scores + states
