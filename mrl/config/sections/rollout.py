"""Settings of generation."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from mrl.section import Section


class RolloutSection(Section):
    """Rollout engines (vLLM): parallel sizes, sampling, memory."""

    tp: int = Field(default=1, ge=1)
    """Split one engine over this many tensor-parallel ranks; engines = training world / (dp x tp). Nodes have
    equal shares of an engine's slots; between nodes, each layer's sums cross the network."""
    dp: int = Field(default=1, ge=1)
    """Run one engine's attention on this many data-parallel ranks of tp slots, each with its own requests and
    KV cache, and distribute whole experts over all dp x tp slots (needs expert_parallel). For models whose KV
    cache tp would only replicate, such as latent attention's."""
    expert_parallel: bool = False
    """Distribute whole experts over the engine's ranks instead of splitting each by tp."""
    step_deadline_seconds: float = Field(default=300.0, ge=1)
    """Wait this many seconds for an engine's other ranks (dp above 1, or tp across nodes) at the start and in
    every step, then name the late one. With `max_replacements`, an engine that takes longer for a call (16
    steps, or some seconds) is lost."""
    max_replacements: int = Field(default=0, ge=0)
    """Tolerate this many lost engines per start of the run: other engines restart the unfinished requests,
    and a new engine joins at a weight sync. Needs `launch.engine_slots`."""
    workers: Literal["driver", "node"] = "driver"
    """Run the groups' coroutines, reward workers and environments in the driver, or in a rollout worker on
    each node of engines, which handles thousands of turns per second that the driver cannot."""
    temperature: float = Field(default=1.0, gt=0)
    """Sample at this temperature; the trainer divides its logits by the same value."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens of this total probability; 1: all. The trainer renormalises over the
    same tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens of at least this share of the top probability; 0: all."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Stop a response after this many tokens."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Store and compute the engine's weights in this type. auto: float32 on CPU, bfloat16 on GPUs and with
    quantization."""
    quantization: Literal["none", "fp8_block"] = "none"
    """Quantise the engine's linear weights to float8 at every weight sync, with a scale per 128 x 128 block
    (fp8_block, DeepSeek-V3's form; half the bytes of bfloat16)."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Run at most this many requests at a time in an engine."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Compute at most this many tokens per forward pass of an engine, at least one for each of max_num_seqs;
    the rest of a prompt waits for the next pass."""
    kv_cache_bytes: Literal["auto"] | Annotated[int, Field(ge=1 << 20)] = "auto"
    """CPU only: size the KV cache of one engine rank (on GPUs, see gpu_memory_utilization). auto: enough for
    max_num_seqs sequences of model.max_length, but for all engines of a machine together at most an eighth of
    its available memory."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """GPUs only: use this share of the device's memory for weights and KV cache."""
    enforce_eager: Literal["auto"] | bool = "auto"
    """Run the model without compiling it. auto: on CPU, where compiling takes a minute or more of each start;
    on CPU with tp always so."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of common prefixes within one version."""
    num_threads: int = Field(default=1, ge=1)
    """Use this many intra-op threads per engine rank on CPU."""
    enable_sleep_mode: bool = True
    """Release the engine's memory during training if the platform can (CUDA)."""
    engine_args: dict[str, Any] = {}
    """Pass these fields to vLLM's EngineArgs (block_size, kv_cache_dtype, attention_backend, all2all_backend,
    compilation_config, ...), except those that another setting decides; the capacity estimate counts only
    kv_cache_dtype."""
    stop_token_ids: tuple[int, ...] = ()
    """Also end a response at these tokens, whose text is kept unless they are special; the tokenizer's
    end-of-text and those of generation_config.json always end it."""
    stop: tuple[str, ...] = ()
    """End a response at these texts, kept with all of the last token; special tokens: stop_token_ids."""

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine, one slot each."""
        return self.dp * self.tp

    @property
    def ep(self) -> int:
        """Number of ranks that share an engine's experts; 1 if tp splits each expert."""
        return self.ranks if self.expert_parallel else 1

    @property
    def truncates(self) -> bool:
        """True if some tokens are never sampled (top_p, top_k, min_p)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def faults(self) -> Iterator[str]:
        if not all(self.stop):
            yield "rollout.stop contains an empty text, which would end every response at once; remove it"
        if self.dp > 1 and not self.expert_parallel:
            yield (
                f"rollout.dp = {self.dp} needs rollout.expert_parallel = true: its ranks share whole "
                "experts; to replicate a dense model, leave dp 1 and run more engines"
            )
        if self.dp > 1 and self.engine_args.get("async_scheduling"):
            yield (
                f"rollout.engine_args.async_scheduling with rollout.dp = {self.dp}: the ranks run every step "
                "together, but its steps may be empty; remove it"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            yield (
                f"rollout.max_num_batched_tokens = {self.max_num_batched_tokens} must be at least "
                f"rollout.max_num_seqs = {self.max_num_seqs}: each running request needs one token per pass"
            )
        if self.quantization != "none" and self.dtype == "float32":
            yield (
                f"rollout.quantization = {self.quantization} needs rollout.dtype = bfloat16 (got "
                f"{self.dtype}): vLLM's float8 kernels support no other activations"
            )
