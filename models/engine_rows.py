"""Describe how vLLM 0.32 stores on one engine rank what families share: names, shapes and checkpoint boxes.

This is the loaders' layout, before any processing after loading. Planning uses it without an engine; for a
live engine the loaders are traced, and a test checks that both agree. Source:
vllm/model_executor/models/{qwen3,qwen3_moe,mixtral,deepseek_v2}.py,
layers/{linear,vocab_parallel_embedding}.py, layers/fused_moe/expert_map_manager.py. No engine is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.layout import divide, padded_vocab
from mrl.models.rows import Experts
from mrl.models.tensors import CheckpointRows, LocalTensor, TensorSlice

VOCAB_PADDING = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Coordinates of one rank in its engine. With `ep` = 1 experts are split by tp like everything else."""

    tp: int
    tp_rank: int
    ep: int = 1
    ep_rank: int = 0

    def experts(self, count: int) -> range:
        """Return this rank's global experts: vLLM's linear placement, a remainder goes to the first ranks."""
        share, remainder = divmod(count, self.ep)
        start = self.ep_rank * share + min(self.ep_rank, remainder)
        return range(start, start + share + (self.ep_rank < remainder))


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRows:
    """Builder of the tensors of one dtype for one shard. Raises ConfigError if vLLM would refuse a split."""

    shard: Shard
    dtype: str

    def whole(self, name: str, *shape: int, dtype: str | None = None) -> LocalTensor:
        """Return a parameter that equals the checkpoint tensor of the same name."""
        zero = (0,) * len(shape)
        return self._tensor(name, shape, [TensorSlice(name, zero, shape, zero)], dtype)

    def stacked(self, name: str, parts: list[tuple[str, int, int]], *columns: int) -> LocalTensor:
        """Stack rows of (tensor, rows, units), each split into min(tp, units) shares, replicated beyond."""
        pieces, offset = [], 0
        for tensor, rows, units in parts:
            shares = min(self.shard.tp, units)
            share = divide(rows, shares, name=f"rows of {tensor} over vLLM's tp")
            index = self.shard.tp_rank * shares // self.shard.tp
            zero = (0,) * len(columns)
            pieces.append(TensorSlice(tensor, (index * share, *zero), (share, *columns), (offset, *zero)))
            offset += share
        return self._tensor(name, (offset, *columns), pieces)

    def sections(
        self, name: str, parts: Sequence[CheckpointRows], *columns: int, dtype: str | None = None
    ) -> LocalTensor:
        """Concatenate runs of rows, each split over tp separately; vectors have no columns."""
        pieces, offset, zero = [], 0, (0,) * len(columns)
        for part in parts:
            share = divide(part.rows, self.shard.tp, name=f"rows of {part.tensor} over vLLM's tp")
            start = part.start + self.shard.tp_rank * share
            pieces.append(TensorSlice(part.tensor, (start, *zero), (share, *columns), (offset, *zero)))
            offset += share
        return self._tensor(name, (offset, *columns), pieces, dtype)

    def split_columns(self, name: str, rows: int, columns: int) -> LocalTensor:
        """Return a share of the columns of the checkpoint tensor of the same name."""
        share = divide(columns, self.shard.tp, name=f"columns of {name} over vLLM's tp")
        piece = TensorSlice(name, (0, self.shard.tp_rank * share), (rows, share), (0, 0))
        return self._tensor(name, (rows, share), [piece])

    def vocabulary(self, name: str, vocab: int, columns: int) -> LocalTensor:
        """Pad the rows to a multiple of 64, then split them; the padding is not loaded."""
        padded = padded_vocab(vocab, multiple=VOCAB_PADDING)
        share = divide(padded, self.shard.tp, name="padded vocabulary over vLLM's tp")
        start = self.shard.tp_rank * share
        rows = max(0, min(vocab - start, share))
        pieces = [TensorSlice(name, (start, 0), (rows, columns), (0, 0))] if rows else []
        return self._tensor(name, (share, columns), pieces)

    def experts(self, name: str, experts: Experts) -> Iterator[LocalTensor]:
        """Yield w13 [experts, 2 * inner, hidden] (gate, up) and w2 [experts, hidden, inner] of a layer."""
        hidden, name_of = experts.hidden, experts.name_of
        parts, index = (self.shard.tp, self.shard.tp_rank) if self.shard.ep == 1 else (1, 0)
        share = divide(experts.inner, parts, name=f"expert width of {name} over vLLM's tp")
        local_experts = self.shard.experts(experts.count)
        w13 = [
            TensorSlice(name_of(expert, part), (index * share, 0), (share, hidden), (local, half * share, 0))
            for local, expert in enumerate(local_experts)
            for half, part in enumerate(("gate", "up"))
        ]
        w2 = [
            TensorSlice(name_of(expert, "down"), (0, index * share), (hidden, share), (local, 0, 0))
            for local, expert in enumerate(local_experts)
        ]
        yield self._tensor(f"{name}.routed_experts.w13_weight", (len(local_experts), 2 * share, hidden), w13)
        yield self._tensor(f"{name}.routed_experts.w2_weight", (len(local_experts), hidden, share), w2)

    def gated_mlp(self, name: str, *, hidden: int, inner: int) -> Iterator[LocalTensor]:
        """Yield gate_up_proj [2 * inner / tp, hidden] and down_proj [hidden, inner / tp]."""
        gate_up = [(f"{name}.{part}_proj.weight", inner, inner) for part in ("gate", "up")]
        yield self.stacked(f"{name}.gate_up_proj.weight", gate_up, hidden)
        yield self.split_columns(f"{name}.down_proj.weight", hidden, inner)

    def grouped_query_attention(
        self, hf: HfConfig, layer: str, *, qk_norm: bool, qkv_bias: bool, gated: bool
    ) -> Iterator[LocalTensor]:
        """Yield the attention's tensors; key and value heads are replicated if tp exceeds their number.

        `gated`: q_proj has a gate after each head's query.
        """
        hidden, groups = field(hf, "hidden_size"), field(hf, "num_key_value_heads")
        heads, width, name = self.heads(hf), head_dim(hf), f"{layer}.self_attn"
        divide(*sorted((groups, self.shard.tp), reverse=True), name="key-value heads and vLLM's tp")
        heads_of = (("q", heads * (1 + gated)), ("k", groups), ("v", groups))
        if qkv_bias:
            biases = [(f"{name}.{part}_proj.bias", count * width, count) for part, count in heads_of]
            yield self.stacked(f"{name}.qkv_proj.bias", biases)
        weights = [(f"{name}.{part}_proj.weight", count * width, count) for part, count in heads_of]
        yield self.stacked(f"{name}.qkv_proj.weight", weights, hidden)
        yield self.split_columns(f"{name}.o_proj.weight", hidden, heads * width)
        if qk_norm:
            yield self.whole(f"{name}.q_norm.weight", width)
            yield self.whole(f"{name}.k_norm.weight", width)

    def heads(self, hf: HfConfig) -> int:
        """Return the number of query heads, which tp must divide."""
        heads = field(hf, "num_attention_heads")
        divide(heads, self.shard.tp, name="attention heads over vLLM's tp")
        return heads

    def _tensor(
        self, name: str, shape: tuple[int, ...], pieces: list[TensorSlice], dtype: str | None = None
    ) -> LocalTensor:
        return LocalTensor(name=name, chunk=0, shape=shape, dtype=dtype or self.dtype, pieces=tuple(pieces))
