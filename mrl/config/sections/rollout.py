"""How responses are generated."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class RolloutSection(Section):
    """The vLLM side."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one engine; engines = training world / (dp x tp). Where its slots lie on several nodes, these
    have equal shares of them, and each layer's sums go over the network."""
    dp: int = Field(default=1, ge=1)
    """Data parallel size of one engine's attention: each of dp ranks, on tp slots, has requests and a KV cache
    of its own, and whole experts are dealt out over all dp x tp slots (needs expert_parallel). For models
    whose KV cache tp would only copy, as latent attention's."""
    expert_parallel: bool = False
    """Deal whole experts out over the engine's ranks instead of cutting each by tp."""
    step_deadline_seconds: float = Field(default=300.0, ge=1)
    """Longest wait of an engine's processes for each other, with dp above 1 or tp over nodes: at the start and in every step. The
    late one is named. With `replace`, an engine that does not answer a call (16 steps, or some seconds) for so long is lost."""
    replace: int = Field(default=0, ge=0)
    """Engines that a start of the run may lose before it ends: each is dropped at once, its unfinished requests are
    started over on the others, and a new one that is started in its place joins at a weight sync. For engines
    with slots of their own (`launch.engine_slots`)."""
    workers: Literal["driver", "node"] = "driver"
    """Where the coroutines of groups run, and beside them reward workers and environments: in the driver, or in
    a rollout worker on each node of engines, which carries thousands of turns a second that the driver cannot."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability; 1 draws from all. Needs temperature
    1, as top_k and min_p do."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many likeliest tokens; 0 draws from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw from tokens at least this likely in units of the likeliest one; 0 draws from all."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Longest response."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and compute type of the engine."""
    quantization: Literal["none", "fp8_block"] = "none"
    """Form of the engine's linear weights: fp8_block quantises them at every weight sync to float8 with a
    scale for each 128 x 128 block (DeepSeek-V3's form), half the bytes of bfloat16."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests an engine runs at one time."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens an engine computes in one pass, at least one for each of max_num_seqs; what is left of a prompt
    waits for the next pass."""
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """On CPU alone: KV cache of one engine rank (on GPUs gpu_memory_utilization says how much there is)."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """On GPUs: share of the device's memory for weights and KV cache."""
    enforce_eager: bool = False
    """Run the model eagerly, without compiling it first; on CPU with tp this is always so."""
    enable_prefix_caching: bool = True
    """Keep KV blocks of common prefixes inside one version."""
    num_threads: int = Field(default=1, ge=1)
    """Intra-op threads of each engine rank on CPU."""
    enable_sleep_mode: bool = True
    """Release the engine's memory while training runs, where the platform can (CUDA)."""
    engine_args: dict[str, Any] = {}
    """Further fields of vLLM's EngineArgs by their own names (block_size, kv_cache_dtype, attention_backend,
    all2all_backend, compilation_config, ...); those that another setting decides are refused. The capacity
    estimate knows nothing of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response, whose text keeps them unless they are special; the tokenizer's
    end-of-text and those of generation_config.json always do."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; its tokens and its text keep them, and what else the last token holds. A special
    token is no text: stop_token_ids has a place for it."""

    @property
    def ranks(self) -> int:
        """Ranks of one engine, a slot each."""
        return self.dp * self.tp

    @property
    def ep(self) -> int:
        """Ranks that an engine's experts are dealt out over; 1 where each is cut by tp."""
        return self.ranks if self.expert_parallel else 1

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn (top_p, top_k, min_p)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def faults(self) -> Iterator[str]:
        if self.truncates and self.temperature != 1:
            yield (
                f"rollout.top_p, top_k and min_p need rollout.temperature = 1 (got {self.temperature:g}): of "
                "truncated sampling vLLM reports the log-probs of the whole vocabulary, which the trainer and "
                "every correction compare with, before the temperature only. loop.validation has a temperature, top_p and top_k of its own"
            )
        if not all(self.stop):
            yield "rollout.stop: an empty text would end every response at once"
        if self.dp > 1 and not self.expert_parallel:
            yield (
                f"rollout.dp = {self.dp} needs rollout.expert_parallel = true: the ranks of such an engine share whole experts; "
                "for copies of a dense model leave dp 1, and more engines run"
            )
        if self.dp > 1 and self.engine_args.get("async_scheduling"):
            yield (
                f"rollout.engine_args.async_scheduling with rollout.dp = {self.dp}: the ranks run every step together, and some of "
                "its steps run nothing"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            yield (
                f"rollout.max_num_batched_tokens = {self.max_num_batched_tokens} must be at least "
                f"rollout.max_num_seqs = {self.max_num_seqs}: each running request needs a token of a pass"
            )
        if self.quantization != "none" and self.dtype != "bfloat16":
            yield (
                f"rollout.quantization = {self.quantization} needs rollout.dtype = bfloat16 (got "
                f"{self.dtype}): vLLM's float8 kernels have no other activations"
            )
