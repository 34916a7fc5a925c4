"""Activations of one rank: what the backward pass of this repository's layers keeps, per microbatch, and how many of them
are alive under the pipeline schedule.

Counted in elements per token from the autograd graph of the layers in models/ (RMSNorm, fused QKV, rotary embedding,
attention per segment, top-k router, SwiGLU experts): the tensors an operation saves, each storage once. Experts are
taken as evenly loaded.
"""

from __future__ import annotations

import dataclasses

from launch.plan.facts import Facts
from launch.plan.training_memory import ELEMENT_BYTES
from models.layer_rows import field, head_dim
from models.names import chunk_layers, padded_vocab
from mrl.config.training import TrainingSection
from resharding.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one rank of one stage."""

    kept: int
    """Saved for the backward pass at the schedule's peak."""
    working: int
    """Alive for a moment on top: one recomputed layer, and the output layer's logits and gradient sum."""
    microbatches_in_flight: float


def activations(
    facts: Facts, training: TrainingSection, layout: Layout, *, stage: int, tokens: int, num_microbatches: int
) -> Activations:
    """Of a stage, for microbatches of `tokens` tokens."""
    element = ELEMENT_BYTES[training.dtype]
    layers = [n for chunk in chunk_layers(facts.num_layers, layout, stage) for n in chunk]
    whole = [layer_bytes(facts, layout, n, tokens=tokens, element=element) for n in layers]
    boundary = tokens // (layout.cp * layout.tp) * facts.hidden * element
    if training.recompute == "full":
        kept, working = len(layers) * boundary, max(sum(parts.values()) for parts in whole)
    elif training.recompute == "selective":
        kept, working = sum(_selective(parts) for parts in whole), max(p["mlp"] for p in whole)
    else:
        kept, working = sum(sum(parts.values()) for parts in whole), 0
    flight = in_flight(layout, stage, num_microbatches)
    kept = int(kept * flight)
    if stage == layout.pp - 1:
        kept += _final_bytes(facts, layout, tokens, element)
        working += head_bytes(facts, training, layout, tokens)
    return Activations(kept=kept, working=working, microbatches_in_flight=flight)


def in_flight(layout: Layout, stage: int, num_microbatches: int) -> float:
    """Microbatches (of all chunks of the rank) whose activations are alive at once: 1F1B or its interleaved form."""
    if layout.pp == 1:
        return 1
    if layout.vpp == 1:
        return min(layout.pp - stage, num_microbatches)
    warm_up = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(warm_up, num_microbatches * layout.vpp) / layout.vpp


def layer_bytes(facts: Facts, layout: Layout, layer: int, *, tokens: int, element: int) -> dict[str, int]:
    """Bytes that one layer saves without recompute, by part (input, attention, core, mlp)."""
    local = tokens // layout.cp
    split = local // layout.tp
    widths = _latent_widths(facts) if facts.latent_attention else _grouped_widths(facts)
    attention = split * widths["split"] + local * widths["whole"] + local * widths["heads"] // layout.tp
    # Input and output of both norms; the inverse deviations are float32.
    norms = split * (4 * facts.hidden * element + 2 * 4)
    return {
        "input": norms,
        "attention": attention * element,
        "core": local * widths["core"] // layout.tp * element,
        "mlp": _mlp_bytes(facts, layout, layer, local=local, element=element),
    }


def _selective(parts: dict[str, int]) -> int:
    return parts["input"] + parts["attention"]


def _grouped_widths(facts: Facts) -> dict[str, int]:
    """Elements per token of grouped-query attention."""
    width = head_dim(facts.hf)
    queries, keys = facts.num_heads * width, facts.kv_heads * width
    # heads: q and k before their norms (views of the fused QKV output), input of the output projection.
    # core: rotated q and k, v, and the attention's output.
    return {"split": 0, "whole": 0, "heads": 2 * queries + 2 * keys, "core": 2 * queries + 2 * keys}


def _latent_widths(facts: Facts) -> dict[str, int]:
    """Elements per token of multi-head latent attention."""
    hf = facts.hf
    key = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    down = (hf.get("q_lora_rank") or 0) + hf["kv_lora_rank"]
    value = hf["v_head_dim"]
    return {
        "split": 2 * down,
        "whole": hf["qk_rope_head_dim"],
        "heads": facts.num_heads * (hf["qk_nope_head_dim"] + 2 * value),
        "core": facts.num_heads * (2 * key + 2 * value),
    }


def _mlp_bytes(facts: Facts, layout: Layout, layer: int, *, local: int, element: int) -> int:
    """SwiGLU keeps, per visit of inner width f: input h, both halves 2f, silu of the gate f, the product f."""
    experts = [row for row in facts.layers[layer] if ".experts." in row.name]
    if not experts:
        return local * 4 * field(facts.hf, "intermediate_size") // layout.tp * element
    split = local // layout.tp
    inner = facts.expert_inner
    visits = split * facts.top_k * layout.etp
    # Input of each expert, its SwiGLU with the product before and after the routing weight.
    routed = visits * (facts.hidden + 5 * inner // layout.etp) * element
    # Router: its float32 input, logits and scores.
    router = split * (facts.hidden + 3 * facts.num_experts) * 4
    shared = local * 4 * inner * (facts.hf.get("n_shared_experts") or 0) // layout.tp * element
    return routed + router + shared


def _final_bytes(facts: Facts, layout: Layout, tokens: int, element: int) -> int:
    """Final norm's input and output, and the hidden states gathered for the output layer."""
    local = tokens // layout.cp
    return (2 * local // layout.tp + local) * facts.hidden * element


def head_bytes(
    facts: Facts, training: TrainingSection, layout: Layout, tokens: int, *, backward: bool = True
) -> int:
    """Two float32 chunks of logits; going back also the float32 sum of the output layer's gradient and the gradient of
    the hidden states."""
    rows = padded_vocab(facts.vocab, tp=layout.tp, pad_vocab_to=1) // layout.tp
    local = tokens // layout.cp
    logits = 2 * min(training.logprob_chunk_tokens, local) * rows * 4
    if not backward:
        return logits
    return logits + rows * facts.hidden * 4 + local * facts.hidden * ELEMENT_BYTES[training.dtype]
