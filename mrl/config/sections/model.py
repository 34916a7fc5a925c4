"""Which model is trained."""

import datetime
from typing import Literal

from pydantic import Field

from mrl.section import Section


class NewModelSection(Section):
    """A small random model and its tokenizer, made on the spot when the model's folder does not exist."""

    family: Literal["qwen3_moe", "qwen3"] = "qwen3_moe"
    """Model type."""
    tokenizer: Literal["characters", "chat", "bpe"] = "characters"
    """characters: one token per character of the files; chat: the same with a mark for each role and a chat template; bpe:
    byte-level pairs trained on the files."""
    tokenizer_files: tuple[str, ...] = ()
    """Files the tokenizer is made from; the training data when empty."""
    vocab_size: int = Field(default=512, ge=8)
    """Largest vocabulary (bpe)."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer layers."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Key and value heads."""
    head_dim: int = Field(default=32, ge=2)
    """Width of one head."""
    num_experts: int = Field(default=8, ge=2)
    """Experts of each layer."""
    num_experts_per_token: int = Field(default=2, ge=1)
    """Experts a token visits."""
    expert_size: int = Field(default=128, ge=8)
    """Inner width of one expert."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the weights on disk."""


class ModelSection(Section):
    """The policy's starting point."""

    path: str
    """Folder in Hugging Face format (config.json, tokenizer, safetensors); the family is read from its
    model_type."""
    new: NewModelSection | None = None
    """What to make at `path` when nothing is there; absent means that the folder must exist."""
    reference_path: str | None = None
    """Folder of the reference policy; the starting point itself when absent."""
    trust_remote_code: bool = False
    """Whether the folder's own Python code is run where its tokenizer is one (Kimi-K2's); a model is never read from
    such code. Read it first: it runs with the rights of the run, on every node."""
    chat_template_date: datetime.date | None = None
    """Date that chat templates write if they ask for today's (gpt-oss, Llama 3.2). By default that of the run's first start,
    which its config.yaml keeps, so that a resumed run renders the same prompts."""
    max_length: int = Field(default=1280, ge=2)
    """Longest prompt plus response, in tokens; if none is given, data.max_prompt_tokens + rollout.max_response_tokens. At
    most max_position_embeddings of config.json, or what YaRN's settings there
    (rope_scaling or rope_parameters; Qwen2, Qwen3, Llama, DeepSeek, gpt-oss) stretch the model to."""
