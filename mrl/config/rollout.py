"""How responses are generated."""

from typing import Literal

from pydantic import Field

from mrl.config.section import Section


class RolloutSection(Section):
    """The vLLM side."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one engine; engines = training world / tp."""
    expert_parallel: bool = False
    """Deal whole experts out over the engine's ranks instead of cutting each by tp (GPU; vLLM's CPU kernels cannot, and it is refused)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Longest response."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and compute type of the engine."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests an engine runs at one time."""
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """KV cache of one engine rank on CPU."""
    memory_fraction: float = Field(default=0.6, gt=0, le=1)
    """Share of the device's memory for weights and KV cache on GPU (vLLM's gpu_memory_utilization)."""
    compiled: bool = True
    """Let vLLM compile the model (on CPU only without tp); False runs it eagerly."""
    prefix_cache: bool = True
    """Keep KV blocks of common prefixes inside one version."""
    num_threads: int = Field(default=1, ge=1)
    """Intra-op threads of each engine rank on CPU."""
    sleep: bool = True
    """Release the engine's memory while training runs, where the platform can (CUDA)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response; the tokenizer's end-of-text always does."""
