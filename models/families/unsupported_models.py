"""List models that cannot be trained: the reason, and the most similar family."""

from __future__ import annotations

from mrl.models.hf_config import HfConfig

_INDEXER = "its indexer of attended tokens (DeepSeek sparse attention) is not implemented"
_CONNECTIONS = "its hyper-connections (several residual streams) are not implemented"
_UNTRIED = "it has not been compared with transformers"
_IMAGES = "training on images is not implemented, and its text model's tensors have other names"
_MAMBA = "its Mamba2 layers are not implemented"
_CHANNEL_DECAY = "its delta net decays per channel, not per head"
_MULTIPLIERS = "its multipliers of embeddings, residuals, attention and logits are not implemented"
_NORMS_AFTER = "it has windows, norms after each block and scaled embeddings"
_HEADS_PER_LAYER = "its windowed layers have another number of heads"

REFUSED: dict[str, tuple[str, str]] = {
    "deepseek_v32": (_INDEXER, "deepseek_v3"),
    "glm_moe_dsa": (_INDEXER, "deepseek_v3"),
    "nemotron_h": ("its Mamba2 layers and experts without a gate are not implemented", "qwen3_moe"),
    "nemotron_h_omni": (_IMAGES, "qwen3_moe"),
    "ernie4_5_moe": (
        "its router adds correction biases to softmax scores, which Megatron does not support",
        "qwen3_moe",
    ),
    "ernie4_5_vl_moe": (_IMAGES, "qwen3_moe"),
    "deepseek_v4": (_CONNECTIONS, "deepseek_v3"),
    "glm5_next": (_CONNECTIONS, "deepseek_v3"),
    "qwen4_exp": (_CONNECTIONS, "qwen3_5_moe"),
    "minimax_m3_vl": ("its indexer of attended blocks of tokens is not implemented", "minimax_m2"),
    "llama4": (_IMAGES, "mixtral"),
    "llama4_text": (
        "some layers have no rotary embedding, others attend only within chunks, and experts are weighted "
        "before they compute",
        "mixtral",
    ),
    "kimi_linear": (_CHANNEL_DECAY, "qwen3_next"),
    "kimi_k3": (_CHANNEL_DECAY, "qwen3_next"),
    "bailing_hybrid": (_CHANNEL_DECAY, "qwen3_next"),
    "bailing_moe_v3_vl": (_IMAGES, "qwen3_next"),
    "bailing_moe": (_UNTRIED, "deepseek_v3"),
    "longcat_flash": ("a layer has two attentions, and some of its experts compute nothing", "deepseek_v3"),
    "mimo_v2_flash": ("its keys and values differ in width, and only windowed layers have sinks", "gpt_oss"),
    "mimo": ("transformers has no class for it to compare with", "qwen2"),
    "step3p5": (f"{_HEADS_PER_LAYER}, and some clamp their experts", "qwen3_moe"),
    "step3p7": (_IMAGES, "qwen3_moe"),
    "laguna": (f"{_HEADS_PER_LAYER}, and each head's output has a softplus gate", "qwen3_moe"),
    "afmoe": ("it has windows, gates of attention and norms after each block", "qwen3_moe"),
    "inkling_mm_model": (_IMAGES, "qwen3_moe"),
    "inkling_text": ("its relative positions and short convolutions are not implemented", "qwen3_moe"),
    "mistral4": (f"{_UNTRIED}; its latent attention is deepseek_v3's", "deepseek_v3"),
    "hunyuan_v1_moe": (_UNTRIED, "qwen3_moe"),
    "hy_v3": (f"{_UNTRIED}, and vLLM reads another form of its folders than transformers writes", "glm4_moe"),
    "hy_v4": (_INDEXER, "deepseek_v3"),
    "exaone_moe": (f"{_UNTRIED}; it has windows, and its full layers no rotary embedding", "glm4_moe"),
    "granite": (_MULTIPLIERS, "llama"),
    "granitemoe": (_MULTIPLIERS, "mixtral"),
    "granitemoehybrid": (f"{_MAMBA}, nor its multipliers", "qwen3_next"),
    "glm4v_moe": (_IMAGES, "glm4_moe"),
    "kimi_vl": (_IMAGES, "deepseek_v3"),
    "qwen2_vl": (_IMAGES, "qwen2"),
    "qwen2_5_vl": (_IMAGES, "qwen2"),
    "mllama": (_IMAGES, "llama"),
    "gemma3_text": (_NORMS_AFTER, "qwen3"),
    "gemma4": (_IMAGES, "qwen3"),
    "gemma4_unified": (_IMAGES, "qwen3"),
    "gemma4_text": (f"{_NORMS_AFTER}, and its full layers have wider heads", "qwen3"),
    "olmo3": ("it has windows, norms over all heads and norms after each block", "olmoe"),
    "ministral": (f"{_UNTRIED}; without windows its layers are mistral's", "mistral"),
}
"""model_type -> (reason, most similar registered family)."""


def reason(hf: HfConfig) -> str:
    """Return why a model_type is not registered, as part of an error message; "" if nothing is known."""
    if known := REFUSED.get(hf.get("model_type", "")):
        return f": {known[0]}; the most similar family is {known[1]}"
    return f": {_IMAGES}" if "vision_config" in hf else ""
