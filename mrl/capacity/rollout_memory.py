"""Weights, KV cache and working memory of one engine rank; the weights by the table of vLLM's own tensors."""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware
from mrl.capacity.model_facts import row_elements
from mrl.capacity.training_memory import ELEMENT_BYTES
from mrl.config.sections.rollout import RolloutSection
from mrl.models.engine_rows import Shard
from mrl.models.facts import Facts
from mrl.resharding.planner import quantised
from mrl.resharding.planner.manifest import RankManifest


@dataclasses.dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one engine rank."""

    weights: int
    """What a weight sync fills."""
    derived: int
    """Computed from the weights after loading (latent attention's absorbed projections)."""
    kv_bytes_per_token: int


def engine_memory(facts: Facts, rollout: RolloutSection) -> EngineMemory:
    """Of rank 0, which holds at least as much as any other."""
    element, tp = ELEMENT_BYTES[rollout.dtype], rollout.tp
    shard = Shard(tp, 0, ep=tp if rollout.expert_parallel else 1)
    wide = RankManifest.of(0, facts.family.engine_tensors(facts.hf, shard, dtype=rollout.dtype))
    (manifest,) = quantised.manifests([wide], rollout.quantization)
    derived = 0
    if facts.latent_attention:
        ups = [
            row for layer in facts.layers for row in layer if row.name.endswith("linear_kv_up_proj.weight")
        ]
        derived = sum(map(row_elements, ups)) // tp * element
    return EngineMemory(
        weights=manifest.num_bytes,
        derived=derived,
        kv_bytes_per_token=_kv_bytes(facts, rollout),
    )


def _kv_bytes(facts: Facts, rollout: RolloutSection) -> int:
    per_layer = facts.kv_elements_per_token
    if not facts.latent_attention:
        heads = max(1, facts.kv_heads // rollout.tp)
        per_layer = per_layer // facts.kv_heads * heads
    return per_layer * facts.num_layers * ELEMENT_BYTES[rollout.dtype]


def kv_cache_bytes(
    facts: Facts, rollout: RolloutSection, hardware: Hardware, engine: EngineMemory
) -> tuple[int, int]:
    """(KV cache, working memory) of one engine rank: on GPU what gpu_memory_utilization leaves, on CPU what is configured."""
    element = ELEMENT_BYTES[rollout.dtype]
    inner = facts.expert_inner * facts.top_k
    per_token = (4 + facts.top_k) * facts.hidden + 3 * inner // rollout.tp
    logits = 2 * rollout.max_num_seqs * facts.vocab * 4
    working = rollout.max_num_batched_tokens * per_token * element + logits
    if hardware.kind == "cpu":
        return rollout.kv_cache_bytes, working
    granted = int(rollout.gpu_memory_utilization * hardware.memory_bytes)
    return granted - engine.weights - engine.derived - working, working
