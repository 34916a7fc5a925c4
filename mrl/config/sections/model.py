"""Settings of the model that is trained."""

import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from mrl.section import Section


class NewModelSection(Section):
    """Small random model and its tokenizer, made if the model's folder does not exist."""

    family: Literal["qwen3_moe", "qwen3"] = "qwen3_moe"
    """Choose the model type."""
    tokenizer: Literal["characters", "chat", "bpe"] = "characters"
    """Use one token per character of the files (characters), the same with role tokens and a chat template
    (chat), or byte-level pairs trained on the files (bpe)."""
    tokenizer_files: tuple[str, ...] = ()
    """Make the tokenizer from these files; empty takes the training data."""
    vocab_size: int = Field(default=512, ge=8)
    """Limit the vocabulary to this many tokens (bpe)."""
    num_layers: int = Field(default=4, ge=1)
    """Number of transformer layers."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads."""
    head_dim: int = Field(default=32, ge=2)
    """Width of one head."""
    num_experts: int = Field(default=8, ge=2)
    """Number of experts per layer."""
    num_experts_per_token: int = Field(default=2, ge=1)
    """Number of experts per token."""
    expert_size: int = Field(default=128, ge=8)
    """Inner width of one expert."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Store weights on disk in this type."""


class ModelSection(Section):
    """Model that the policy starts from."""

    path: str
    """Load this Hugging Face folder (config.json, tokenizer, safetensors); model_type names the family.
    A hub name (Qwen/Qwen2.5-0.5B-Instruct, also hf://...) that is not a local folder is read from the hub's
    cache: run `hf download NAME` first, or set HF_HUB_OFFLINE=0. Every node needs the cache."""
    new: NewModelSection | None = None
    """Make this model if `path` does not exist; null requires that the folder exists."""
    reference_path: str | None = None
    """Load the reference policy from this folder or hub name; null takes the starting point."""
    trust_remote_code: bool = False
    """Run the folder's own Python code for its tokenizer (Kimi-K2's), never for a model. Read the code first:
    it runs with the run's rights on every node."""
    chat_template_date: datetime.date | None = None
    """Give this date to chat templates that ask for today's (gpt-oss, Llama 3.2); null takes the date of the
    run's first start, which its config.yaml keeps so that a resumed run renders the same prompts."""
    max_length: int = Field(default=1280, ge=2)
    """Limit prompt plus response to this many tokens; data.max_prompt_tokens + rollout.max_response_tokens if
    not given. At most max_position_embeddings of config.json, or the length that its YaRN settings stretch
    the model to (rope_scaling or rope_parameters; Qwen2, Qwen3, Llama, DeepSeek, gpt-oss)."""

    def is_start(self, path: str) -> bool:
        """Return True if the policy starts from this folder."""
        return Path(path).resolve() == Path(self.path).resolve()
