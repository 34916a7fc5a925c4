"""Estimate weights, KV cache and working memory of one engine rank, the weights from the table of vLLM's
tensors.

A latent cache is shared by all heads, so every tp rank has all of it; a dp rank has that of its own requests.
"""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware
from mrl.capacity.model_facts import row_elements
from mrl.config.sections.rollout import RolloutSection
from mrl.models.delta_net import delta_net
from mrl.models.engine_rows import Shard
from mrl.models.facts import ModelSize
from mrl.resharding.planner import quantised
from mrl.resharding.planner.manifest import DTYPE_BYTES, RankManifest


@dataclasses.dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one engine rank."""

    weights: int
    """Bytes that a weight sync fills."""
    derived: int
    """Bytes computed from the weights after loading (latent attention's absorbed projections)."""
    working: int
    kv_cache: int
    """On GPUs, the rest of gpu_memory_utilization (may be negative); on CPU, as configured."""
    kv_bytes_per_token: int
    states: int = 0
    """Part of the KV cache for the delta nets' states of max_num_seqs sequences, at most."""

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit the KV cache besides the states."""
        return max(0, self.kv_cache - self.states) // self.kv_bytes_per_token


def engine_memory(facts: ModelSize, rollout: RolloutSection, hardware: Hardware) -> EngineMemory:
    """Return the memory of rank 0, which needs at least as much as any other."""
    element, tp = DTYPE_BYTES[rollout.dtype], rollout.tp
    shard = Shard(tp, 0, ep=rollout.ep)
    wide = RankManifest.of(0, facts.family.engine_tensors(facts.hf, shard, dtype=rollout.dtype))
    (manifest,) = quantised.manifests([wide], rollout.quantization)
    rows = [row for layer in facts.layers for row in layer] if facts.latent_attention else []
    absorbed = [row_elements(row) for row in rows if row.name.endswith("linear_kv_up_proj.weight")]
    derived, working = sum(absorbed) // tp * element, _working_bytes(facts, rollout)
    granted = int(rollout.gpu_memory_utilization * hardware.memory_bytes)
    left = granted - manifest.num_bytes - derived - working
    return EngineMemory(
        weights=manifest.num_bytes,
        derived=derived,
        working=working,
        kv_cache=int(rollout.kv_cache_bytes) if hardware.kind == "cpu" else left,
        kv_bytes_per_token=kv_token_bytes(facts, rollout),
        states=state_bytes(facts, rollout),
    )


def kv_token_bytes(facts: ModelSize, rollout: RolloutSection) -> int:
    """Return the bytes of one token in the KV cache of an engine rank."""
    per_layer = facts.kv_elements_per_token
    if not facts.latent_attention:
        heads = max(1, facts.kv_heads // rollout.tp)
        per_layer = per_layer // facts.kv_heads * heads
    is_float8 = str(rollout.engine_args.get("kv_cache_dtype", "auto")).startswith("fp8")
    return per_layer * facts.attention_layers * (1 if is_float8 else DTYPE_BYTES[rollout.dtype])


def state_bytes(facts: ModelSize, rollout: RolloutSection) -> int:
    """Return the bytes of the delta nets' states (float32 at most) and last convolution inputs."""
    if not facts.delta_nets:
        return 0
    net = delta_net(facts.hf)
    last = (net.filter_width - 1) * net.convolved * DTYPE_BYTES[rollout.dtype]
    return rollout.max_num_seqs * facts.delta_nets * (4 * net.state_elements + last) // rollout.tp


def _working_bytes(facts: ModelSize, rollout: RolloutSection) -> int:
    """Return the bytes of the largest batch's activations and two arrays of its sequences' logits. Experts
    see the tokens of all dp ranks (vLLM's default exchange gathers them)."""
    inner = facts.expert_inner * facts.top_k
    of_experts = facts.top_k * facts.hidden + 3 * inner // rollout.tp
    if rollout.dp > 1:
        of_experts += 2 * facts.hidden  # gathered tokens, and sums before the scatter
    per_token = 4 * facts.hidden + of_experts * rollout.dp
    logits = 2 * rollout.max_num_seqs * facts.vocab * 4
    return rollout.max_num_batched_tokens * per_token * DTYPE_BYTES[rollout.dtype] + logits
