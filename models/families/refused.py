"""Models that are not trained here: why, and which family is their nearest relative."""

from __future__ import annotations

from mrl.models.hf_config import HfConfig

_INDEXER = "its attention sees the tokens that an indexer chooses (DeepSeek sparse attention), which is not computed here"
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
