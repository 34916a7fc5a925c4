"""Models that are not trained here: why, and which family is their nearest relative."""

from __future__ import annotations

from mrl.models.hf_config import HfConfig

_INDEXER = "its attention sees the tokens that an indexer chooses (DeepSeek sparse attention), which is not computed here"
_CONNECTIONS = "its layers are joined by hyper-connections, of several residual streams, for which there are no modules here"
_UNTRIED = "nobody has held it against transformers here"
_IMAGES = "images are not trained here, and its text model's tensors have other names"

REFUSED: dict[str, tuple[str, str]] = {
    "deepseek_v32": (_INDEXER, "deepseek_v3"),
    "glm_moe_dsa": (_INDEXER, "deepseek_v3"),
    "nemotron_h": (
        "it has Mamba2 layers and experts without a gate, for which there are no modules here",
        "qwen3_moe",
    ),
    "ernie4_5_moe": (
        "its router adds correction biases to softmax scores, which Megatron does not",
        "qwen3_moe",
    ),
    "deepseek_v4": (_CONNECTIONS, "deepseek_v3"),
    "glm5_next": (_CONNECTIONS, "deepseek_v3"),
    "qwen4_exp": (_CONNECTIONS, "qwen3_5_moe"),
    "minimax_m3_vl": (
        "its attention sees the blocks of tokens that an indexer chooses, which is not computed here",
        "minimax_m2",
    ),
    "llama4": (_IMAGES, "mixtral"),
    "llama4_text": (
        "some layers have no rotary embedding and others see chunks alone, and experts are weighed before they compute",
        "mixtral",
    ),
    "kimi_linear": ("its delta net forgets by channel, not by head", "qwen3_next"),
    "longcat_flash": ("a layer has two attentions, and some of its experts compute nothing", "deepseek_v3"),
    "mimo_v2_flash": ("its keys and values have other widths, and its windows alone have sinks", "gpt_oss"),
    "step3p5": (
        "its layers with windows have another number of heads, and some clamp their experts",
        "qwen3_moe",
    ),
    "mistral4": (f"{_UNTRIED}; its latent attention is deepseek_v3's", "deepseek_v3"),
    "mistral3": (_IMAGES, "llama"),
    "hunyuan_v1_moe": (_UNTRIED, "qwen3_moe"),
    "seed_oss": (_UNTRIED, "qwen2"),
    "glm4v_moe": (_IMAGES, "glm4_moe"),
    "kimi_vl": (_IMAGES, "deepseek_v3"),
    "kimi_k25": (_IMAGES, "deepseek_v3"),
    "qwen2_vl": (_IMAGES, "qwen2"),
    "qwen2_5_vl": (_IMAGES, "qwen2"),
    "qwen3_vl": (_IMAGES, "qwen3"),
    "qwen3_vl_moe": (_IMAGES, "qwen3_moe"),
    "mllama": (_IMAGES, "llama"),
    "gemma3_text": ("it has windows, norms after each block and scaled embeddings", "qwen3"),
    "mistral": (
        "nobody has held it against transformers here; its layers are llama's where it has no window",
        "llama",
    ),
}
"""model_type -> the reason, and the nearest registered family."""


def reason(hf: HfConfig) -> str:
    """What is known of a model_type that is not registered, to be put behind that sentence; else nothing."""
    if known := REFUSED.get(hf.get("model_type", "")):
        return f": {known[0]}; the nearest family is {known[1]}"
    return f": {_IMAGES}" if "vision_config" in hf else ""
