"""Estimate the activations of one trainer rank: what the backward pass keeps, and for how many micro-batches.

Counted from the autograd graph of the layers in models/ (RMSNorm, fused QKV, rotary embedding, attention per
segment, top-k router, SwiGLU experts): the tensors that operations save, each storage once; a test compares
with real runs. Experts are assumed evenly loaded. On CUDA torch's RMSNorm is one kernel and keeps only its
input; on CPU it keeps two float32 arrays. Transformer Engine's attention on CUDA passes keys and values
around the context-parallel ranks; ours on CPU gathers and keeps them. With its layers SwiGLU is one kernel
that keeps only its input (megatron.core.fusions.fused_bias_swiglu).
"""

from __future__ import annotations

import dataclasses

from mrl.config.sections.training import TrainingSection
from mrl.models.delta_net import CHUNK, delta_net
from mrl.models.facts import ModelSize
from mrl.models.hf_config import field, head_dim
from mrl.models.layout import Layout, chunk_layers, padded_vocab
from mrl.resharding.planner.manifest import DTYPE_BYTES

RECOMPUTED = ("core", "mlp", "moe")
"""Parts of a layer that training.recompute = selective recomputes instead of keeping."""


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Activation bytes on one rank of one stage."""

    kept: int
    """Bytes saved for the backward pass at the schedule's peak."""
    working: int
    """Temporary bytes on top: one recomputed layer, and the output layer's logits and gradient sum."""
    microbatches_in_flight: float


@dataclasses.dataclass(frozen=True, slots=True)
class Counter:
    """Counter of the bytes of each layer part, for one micro-batch of `tokens` tokens on one rank."""

    facts: ModelSize
    layout: Layout
    element: int
    tokens: int
    fused: bool
    """RMSNorm is one kernel, and keys and values stay split over context-parallel ranks (CUDA)."""
    fused_swiglu: bool = False
    """SwiGLU is one kernel that includes the routing weight (Transformer Engine's layers)."""

    @property
    def local(self) -> int:
        """Tokens of this context-parallel rank."""
        return self.tokens // self.layout.cp

    @property
    def split(self) -> int:
        """Tokens of this rank if the sequence is split over tp."""
        return self.local // self.layout.tp

    @property
    def key_rows(self) -> int:
        """Tokens whose keys and values the attention keeps for this rank's heads."""
        return self.split if self.fused else self.tokens // self.layout.tp

    def norm(self, rows: int, width: int) -> int:
        """Return the bytes that one RMSNorm keeps; its output counts for the next operation."""
        inverse = 4 * rows
        if self.fused:
            return rows * width * self.element + inverse
        return 2 * rows * width * 4 + inverse

    def layer(self, number: int) -> dict[str, int]:
        """Return the bytes kept without recompute, by part; core_inputs replace core if it is recomputed."""
        hidden = self.split * self.facts.hidden
        attention, core, inputs = self._attention(number)
        parts = {
            "norms": 2 * (self.norm(self.split, self.facts.hidden) + hidden * self.element),
            "attention": attention,
            "core": core,
            "core_inputs": inputs,
        }
        is_moe = any(".experts." in row.name for row in self.facts.layers[number])
        return parts | (self._experts() if is_moe else self._mlp())

    def _attention(self, number: int) -> tuple[int, int, int]:
        """Return the bytes (around the attention core, inside it, its inputs) of a layer."""
        if self.facts.family.is_delta_net(self.facts.hf, number):
            return self._delta_net()
        return self._latent() if self.facts.latent_attention else self._grouped()

    def _delta_net(self) -> tuple[int, int, int]:
        """Return the same bytes for a gated delta net, whose core begins before its convolution.

        flash-linear-attention's kernels keep the convolution's input and output, queries and keys of every
        value head, gates and output before and after the norm, and a triangle of 64 per token and head. torch
        keeps all of it in float32, plus four triangles and six arrays of a head's width.
        """
        net, rows = delta_net(self.facts.hf), self.local // self.layout.tp
        wide, chunk = net.value_heads * (net.key_width + net.value_width), net.value_heads * CHUNK
        projected = rows * (net.convolved + net.values + 2 * net.value_heads) * self.element
        core = rows * (net.convolved + 2 * wide + 2 * net.values + chunk) * self.element
        if not self.fused:
            core = rows * (4 * net.convolved + 8 * wide + 4 * chunk) * 4
        return rows * net.values * self.element, core, projected

    def _grouped(self) -> tuple[int, int, int]:
        """Return the bytes (around the core, inside it, its unrotated inputs) of grouped-query attention."""
        facts, rows = self.facts, self.local // self.layout.tp
        width = head_dim(facts.hf)
        queries, keys = facts.num_heads * width, facts.kv_heads * width
        around = rows * queries * self.element  # input of the output projection
        if facts.family.output_gate:
            around += 2 * rows * queries * self.element  # the gate, and what it weighs
        around += self.norm(rows * facts.num_heads, width) + self.norm(rows * facts.kv_heads, width)
        fused_qkv = rows * (queries + 2 * keys) * self.element
        if self.fused or self.element == 4:
            around += fused_qkv - rows * keys * self.element  # keys are a view of it that their norm keeps
            if facts.kv_heads <= self.layout.tp:
                around -= rows * queries * self.element  # and so are queries of a single group
        # Rotated queries and keys, values, output, and the sums of exponentials.
        core = 2 * (rows * queries + self.key_rows * keys) * self.element + 4 * rows * facts.num_heads
        inputs = rows * (queries + keys) * self.element  # values are a view of the fused tensor
        return around, core, inputs if self.fused or self.element == 4 else inputs + fused_qkv

    def _latent(self) -> tuple[int, int, int]:
        """Return the same bytes for multi-head latent attention."""
        hf, rows = self.facts.hf, self.local // self.layout.tp
        heads, nope, rope = self.facts.num_heads, hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
        value, down = hf["v_head_dim"], (hf.get("q_lora_rank") or 0) + hf["kv_lora_rank"]
        around = (
            self.norm(self.split, down) + self.split * down * self.element + self.local * rope * self.element
        )
        around += rows * heads * value * self.element
        core = (rows + self.key_rows) * heads * (nope + rope + value) * self.element + 4 * rows * heads
        return around, core, rows * heads * (2 * nope + rope + value) * self.element

    def _mlp(self) -> dict[str, int]:
        """Return the bytes of SwiGLU of inner width f: halves 2f, activation and input 2f, product f (fused:
        3f)."""
        inner = 3 if self.fused_swiglu else 5
        width = field(self.facts.hf, "intermediate_size")
        return {"mlp": self.local * inner * width // self.layout.tp * self.element}

    def _experts(self) -> dict[str, int]:
        """Return the bytes of routed experts (product kept again after the weighting) and shared ones."""
        facts, layout = self.facts, self.layout
        visits, width = self.split * facts.top_k * layout.etp, facts.expert_inner // layout.etp
        # Scores and map of the router; indices and weights of the visits.
        router = self.split * (9 * facts.num_experts + 36 * facts.top_k)
        routed = visits * (facts.hidden + (3 if self.fused_swiglu else 6) * width)
        inner = 3 if self.fused_swiglu else 5
        shared = inner * facts.family.shared_width(facts.hf)
        gated = self.split * facts.hidden if facts.family.gated_shared else 0  # what the gate weighs
        return {"moe": router + (routed + self.local * shared // layout.tp + gated) * self.element}

    def final(self) -> int:
        """Return the bytes kept by the final norm and the hidden states gathered for the output layer."""
        return self.norm(self.split, self.facts.hidden) + self.local * self.facts.hidden * self.element


def activations(
    facts: ModelSize,
    training: TrainingSection,
    layout: Layout,
    *,
    stage: int,
    tokens: int,
    num_microbatches: int,
    fused: bool = True,
) -> Activations:
    """Return the activations of a stage for micro-batches of `tokens` tokens."""
    fused_swiglu = fused and training.spec != "local" and not facts.family.needs_own_attention
    count = Counter(facts, layout, DTYPE_BYTES[training.dtype], tokens, fused, fused_swiglu)
    numbers = [n for chunk in chunk_layers(facts.num_layers, layout, stage) for n in chunk]
    parts = [count.layer(number) for number in numbers]
    layer_sizes = [sum(part.values()) - part["core_inputs"] for part in parts]
    if training.recompute == "full":
        kept, working = len(parts) * count.split * facts.hidden * count.element, max(layer_sizes)
    elif training.recompute == "selective":
        kept, working = _selected(parts)
    else:
        kept, working = sum(layer_sizes), 0
    flight = in_flight(layout, stage, num_microbatches)
    kept = int(kept * flight)
    if stage == layout.pp - 1:
        kept += count.final()
        working += head_bytes(facts, training, layout, tokens)
        if training.drafts == "trained":
            working += draft_bytes(facts, count, layer_sizes[-1])
    return Activations(kept=kept, working=working, microbatches_in_flight=flight)


def draft_bytes(facts: ModelSize, count: Counter, layer: int) -> int:
    """Return the bytes that a draft head keeps until its backward pass, with a layer of `layer` bytes: the
    embeddings and hidden states, their norms, both side by side, the projection, and the final states."""
    states = 7 * count.split * facts.hidden * count.element + count.final()
    embedding = facts.vocab * facts.hidden // count.layout.tp * count.element
    return layer + states + (embedding if count.layout.pp > 1 else 0)


def _selected(layers: list[dict[str, int]]) -> tuple[int, int]:
    """Return (bytes that layers keep, bytes of the largest recomputed part)."""
    kept = sum(size for layer in layers for part, size in layer.items() if part not in RECOMPUTED)
    return kept, max(layer.get(part, 0) for layer in layers for part in RECOMPUTED)


def in_flight(layout: Layout, stage: int, num_microbatches: int) -> float:
    """Return how many micro-batches (of all the rank's chunks) are alive at once under (interleaved) 1F1B."""
    if layout.pp == 1:
        return 1
    if layout.vpp == 1:
        return min(layout.pp - stage, num_microbatches)
    warm_up = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(warm_up, num_microbatches * layout.vpp) / layout.vpp


def head_bytes(
    facts: ModelSize, training: TrainingSection, layout: Layout, tokens: int, *, backward: bool = True
) -> int:
    """Return the bytes of log-probs: two float32 chunks of logits, and in a backward pass two more gradients.

    Those are the float32 sum of the output layer's gradient and the gradient of the hidden states.
    """
    rows = padded_vocab(facts.vocab, multiple=layout.tp) // layout.tp
    local = tokens // layout.cp
    logits = 2 * min(training.logprob_chunk_tokens, local) * rows * 4
    if not backward:
        return logits
    return logits + rows * facts.hidden * 4 + local * facts.hidden * DTYPE_BYTES[training.dtype]
