"""config.json of the small random model that `model.new` describes. Pure: planning reads it too."""

from __future__ import annotations

from typing import Any

from mrl.config.sections.model import NewModelSection

LATENT_WIDTH, ROTARY_WIDTH = 512, 64
"""DeepSeek-V3's own: together 576, the one width that vLLM's latent attention knows on CPU."""


def hf_config(new: NewModelSection, *, vocab_size: int, max_length: int) -> dict[str, Any]:
    """The keys that matter, in transformers' spelling; the vocabulary is rounded up to a multiple of 16."""
    return {
        "model_type": new.family,
        "vocab_size": -(-vocab_size // 16) * 16,  # divides by any small tensor-parallel size
        "hidden_size": new.hidden_size,
        "intermediate_size": new.expert_size * (1 if new.family == "mixtral" else new.num_experts_per_token),
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    } | _FAMILIES[new.family](new, max_length)


def _qwen3_moe(new: NewModelSection, max_length: int) -> dict[str, Any]:
    return {
        "num_experts": new.num_experts,
        "num_experts_per_tok": new.num_experts_per_token,
        "moe_intermediate_size": new.expert_size,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def _mixtral(new: NewModelSection, max_length: int) -> dict[str, Any]:
    return {"num_local_experts": new.num_experts, "num_experts_per_tok": new.num_experts_per_token}


def _deepseek_v3(new: NewModelSection, max_length: int) -> dict[str, Any]:
    """YaRN over a quarter of the length, a dense first layer, one shared expert, compressed queries; `head_dim` is the width of values and plain keys."""
    return {
        "num_key_value_heads": new.num_heads,
        "head_dim": ROTARY_WIDTH,
        "q_lora_rank": new.hidden_size // 2,
        "kv_lora_rank": LATENT_WIDTH,
        "qk_rope_head_dim": ROTARY_WIDTH,
        "qk_nope_head_dim": new.head_dim,
        "v_head_dim": new.head_dim,
        "n_routed_experts": new.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": new.num_experts_per_token,
        "moe_intermediate_size": new.expert_size,
        "first_k_dense_replace": min(1, new.num_layers - 1),
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": max(1, max_length // 4),
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


_FAMILIES = {
    "qwen3": lambda new, max_length: {},
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
}
