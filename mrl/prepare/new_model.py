"""config.json of the small random model that `model.new` describes; planning reads it too."""

from __future__ import annotations

from typing import Any

from mrl.config.sections.model import NewModelSection
from mrl.models.families import FAMILIES


def hf_config(new: NewModelSection, *, vocab_size: int, max_length: int) -> dict[str, Any]:
    """The keys that matter, in transformers' spelling; the vocabulary is rounded up to a multiple of 16."""
    family = FAMILIES[new.family]
    return {
        "model_type": new.family,
        "vocab_size": -(-vocab_size // 16) * 16,  # divides by any small tensor-parallel size
        "hidden_size": new.hidden_size,
        "intermediate_size": new.expert_size * new.num_experts_per_token,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    } | family.new_fields(new, max_length)
