"""How vLLM 0.32 stores each family on one rank of an engine: parameter names, shapes and the checkpoint boxes in them.

The loaders' layout, before any processing after loading. It serves planning without an engine; a live engine is asked by
tracing its loaders, and a test holds the two equal. Facts: vllm/model_executor/models/{qwen3,qwen3_moe,mixtral,
deepseek_v2}.py, layers/{linear,vocab_parallel_embedding}.py, layers/fused_moe/expert_map_manager.py. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mrl.errors import ConfigError
from mrl.models import deepseek_v3_names, mixtral_names, qwen3_names
from mrl.models.hf_config import HfConfig, field, head_dim, require_no_attention_bias
from mrl.models.layout import divide, padded_vocab
from mrl.models.tensors import LocalTensor, Piece

VOCAB_PADDING = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank of one engine. With `ep` = 1 experts are split by tp like everything else."""

    tp: int
    tp_rank: int
    ep: int = 1
    ep_rank: int = 0

    def experts(self, count: int) -> range:
        """Global experts of this rank: vLLM's linear placement, a remainder goes to the first ranks."""
        share, rest = divmod(count, self.ep)
        start = self.ep_rank * share + min(self.ep_rank, rest)
        return range(start, start + share + (self.ep_rank < rest))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Writes local tensors of one dtype for one shard."""

    shard: Shard
    dtype: str

    def whole(self, name: str, tensor: str, *shape: int, dtype: str | None = None) -> LocalTensor:
        zero = (0,) * len(shape)
        return self._tensor(name, shape, [Piece(tensor, zero, shape, zero)], dtype)

    def stacked(self, name: str, parts: list[tuple[str, int, int]], columns: int) -> LocalTensor:
        """Rows of several tensors, each (tensor, rows, units): split into min(tp, units) shares, replicated beyond."""
        pieces, at = [], 0
        for tensor, rows, units in parts:
            shares = min(self.shard.tp, units)
            share = divide(rows, shares, what=f"rows of {tensor} over vLLM's tp")
            index = self.shard.tp_rank * shares // self.shard.tp
            pieces.append(Piece(tensor, (index * share, 0), (share, columns), (at, 0)))
            at += share
        return self._tensor(name, (at, columns), pieces)

    def split_columns(self, name: str, tensor: str, rows: int, columns: int) -> LocalTensor:
        share = divide(columns, self.shard.tp, what=f"columns of {tensor} over vLLM's tp")
        piece = Piece(tensor, (0, self.shard.tp_rank * share), (rows, share), (0, 0))
        return self._tensor(name, (rows, share), [piece])

    def vocabulary(self, name: str, tensor: str, vocab: int, columns: int) -> LocalTensor:
        """Rows padded to a multiple of 64, then split; the padding is not loaded."""
        padded = padded_vocab(vocab, tp=1, pad_vocab_to=VOCAB_PADDING)
        share = divide(padded, self.shard.tp, what="padded vocabulary over vLLM's tp")
        start = self.shard.tp_rank * share
        rows = max(0, min(vocab - start, share))
        pieces = [Piece(tensor, (start, 0), (rows, columns), (0, 0))] if rows else []
        return self._tensor(name, (share, columns), pieces)

    def experts(
        self, name: str, count: int, name_of: Callable[[int, str], str], *, hidden: int, inner: int
    ) -> Iterator[LocalTensor]:
        """w13 [experts, 2 * inner, hidden] (gate rows, then up rows) and w2 [experts, hidden, inner] of one layer."""
        parts, index = (self.shard.tp, self.shard.tp_rank) if self.shard.ep == 1 else (1, 0)
        share = divide(inner, parts, what=f"expert width of {name} over vLLM's tp")
        mine = self.shard.experts(count)
        w13, w2 = [], []
        for local, expert in enumerate(mine):
            for half, part in enumerate(("gate", "up")):
                rows = Piece(
                    name_of(expert, part), (index * share, 0), (share, hidden), (local, half * share, 0)
                )
                w13.append(rows)
            w2.append(Piece(name_of(expert, "down"), (0, index * share), (hidden, share), (local, 0, 0)))
        yield self._tensor(f"{name}.routed_experts.w13_weight", (len(mine), 2 * share, hidden), w13)
        yield self._tensor(f"{name}.routed_experts.w2_weight", (len(mine), hidden, share), w2)

    def gated_mlp(self, name: str, *, hidden: int, inner: int) -> Iterator[LocalTensor]:
        gate_up = [(f"{name}.{part}_proj.weight", inner, inner) for part in ("gate", "up")]
        yield self.stacked(f"{name}.gate_up_proj.weight", gate_up, hidden)
        yield self.split_columns(f"{name}.down_proj.weight", f"{name}.down_proj.weight", hidden, inner)

    def _tensor(
        self, name: str, shape: tuple[int, ...], pieces: list[Piece], dtype: str | None = None
    ) -> LocalTensor:
        return LocalTensor(name=name, chunk=0, shape=shape, dtype=dtype or self.dtype, pieces=tuple(pieces))


def local_tensors(hf: HfConfig, shard: Shard, *, dtype: str = "bfloat16") -> list[LocalTensor]:
    """Every parameter of one rank. ConfigError where vLLM would refuse the split, or the family is unknown."""
    family = hf.get("model_type")
    if family not in LAYERS:
        raise ConfigError(f"model_type {family!r}: vLLM's layout is known for {sorted(LAYERS)} only")
    require_no_attention_bias(hf)
    table, hidden, vocab = Table(shard, dtype), field(hf, "hidden_size"), field(hf, "vocab_size")
    tensors = [table.vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight", vocab, hidden)]
    for number in range(field(hf, "num_hidden_layers")):
        tensors.extend(LAYERS[family](table, hf, number))
    tensors.append(table.whole("model.norm.weight", "model.norm.weight", hidden))
    if not hf.get("tie_word_embeddings", False):
        tensors.append(table.vocabulary("lm_head.weight", "lm_head.weight", vocab, hidden))
    return tensors


def _norms(table: Table, hf: HfConfig, layer: str) -> Iterator[LocalTensor]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        full = f"{layer}.{name}.weight"
        yield table.whole(full, full, field(hf, "hidden_size"))


def _attention(table: Table, hf: HfConfig, layer: str, *, qk_norm: bool) -> Iterator[LocalTensor]:
    hidden, heads, groups = (
        field(hf, k) for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width, name = head_dim(hf), f"{layer}.self_attn"
    divide(heads, table.shard.tp, what="attention heads over vLLM's tp")
    divide(*sorted((groups, table.shard.tp), reverse=True), what="key-value heads and vLLM's tp")
    parts = [
        (f"{name}.{p}_proj.weight", n * width, n) for p, n in (("q", heads), ("k", groups), ("v", groups))
    ]
    yield table.stacked(f"{name}.qkv_proj.weight", parts, hidden)
    yield table.split_columns(f"{name}.o_proj.weight", f"{name}.o_proj.weight", hidden, heads * width)
    if qk_norm:
        for part in ("q_norm", "k_norm"):
            yield table.whole(f"{name}.{part}.weight", f"{name}.{part}.weight", width)


def _qwen3(table: Table, hf: HfConfig, number: int) -> Iterator[LocalTensor]:
    layer = f"model.layers.{number}"
    yield from _attention(table, hf, layer, qk_norm=True)
    moe = hf["model_type"] == "qwen3_moe" and qwen3_names.is_moe_layer(hf, number)
    hidden = field(hf, "hidden_size")
    if not moe:
        yield from table.gated_mlp(f"{layer}.mlp", hidden=hidden, inner=field(hf, "intermediate_size"))
    else:
        count = field(hf, "num_experts", "num_local_experts")
        yield table.whole(f"{layer}.mlp.gate.weight", f"{layer}.mlp.gate.weight", count, hidden)
        yield from table.experts(
            f"{layer}.mlp.experts",
            count,
            lambda expert, part: f"{layer}.mlp.experts.{expert}.{part}_proj.weight",
            hidden=hidden,
            inner=field(hf, "moe_intermediate_size"),
        )
    yield from _norms(table, hf, layer)


def _mixtral(table: Table, hf: HfConfig, number: int) -> Iterator[LocalTensor]:
    layer, hidden, count = f"model.layers.{number}", field(hf, "hidden_size"), field(hf, "num_local_experts")
    moe = f"{layer}.block_sparse_moe"
    yield from _attention(table, hf, layer, qk_norm=False)
    yield table.whole(f"{moe}.gate.weight", f"{moe}.gate.weight", count, hidden)
    yield from table.experts(
        f"{moe}.experts",
        count,
        lambda expert, part: f"{moe}.experts.{expert}.{mixtral_names.PARTS[part]}.weight",
        hidden=hidden,
        inner=field(hf, "intermediate_size"),
    )
    yield from _norms(table, hf, layer)


def _deepseek_v3(table: Table, hf: HfConfig, number: int) -> Iterator[LocalTensor]:
    layer, hidden = f"model.layers.{number}", field(hf, "hidden_size")
    yield from _latent_attention(table, hf, f"{layer}.self_attn")
    if not deepseek_v3_names.is_moe_layer(hf, number):
        yield from table.gated_mlp(f"{layer}.mlp", hidden=hidden, inner=field(hf, "intermediate_size"))
    else:
        count, inner = field(hf, "n_routed_experts", "num_local_experts"), field(hf, "moe_intermediate_size")
        gate = f"{layer}.mlp.gate"
        yield table.whole(f"{gate}.weight", f"{gate}.weight", count, hidden)
        bias = f"{gate}.e_score_correction_bias"
        yield table.whole(bias, bias, count, dtype="float32")
        if shared := hf.get("n_shared_experts"):
            yield from table.gated_mlp(f"{layer}.mlp.shared_experts", hidden=hidden, inner=inner * shared)
        yield from table.experts(
            f"{layer}.mlp.experts",
            count,
            lambda expert, part: f"{layer}.mlp.experts.{expert}.{part}_proj.weight",
            hidden=hidden,
            inner=inner,
        )
    yield from _norms(table, hf, layer)


def _latent_attention(table: Table, hf: HfConfig, name: str) -> Iterator[LocalTensor]:
    hidden, heads = field(hf, "hidden_size"), field(hf, "num_attention_heads")
    nope, rope, value = field(hf, "qk_nope_head_dim"), field(hf, "qk_rope_head_dim"), field(hf, "v_head_dim")
    rank = field(hf, "kv_lora_rank")
    divide(heads, table.shard.tp, what="attention heads over vLLM's tp")
    down = f"{name}.kv_a_proj_with_mqa.weight"
    if q_rank := hf.get("q_lora_rank"):
        parts = [(f"{name}.q_a_proj.weight", q_rank, 1), (down, rank + rope, 1)]
        yield table.stacked(f"{name}.fused_qkv_a_proj.weight", parts, hidden)
        yield table.whole(f"{name}.q_a_layernorm.weight", f"{name}.q_a_layernorm.weight", q_rank)
        q_up = f"{name}.q_b_proj.weight"
        yield table.stacked(q_up, [(q_up, heads * (nope + rope), heads)], q_rank)
    else:
        yield table.whole(down, down, rank + rope, hidden)
        q_proj = f"{name}.q_proj.weight"
        yield table.stacked(q_proj, [(q_proj, heads * (nope + rope), heads)], hidden)
    yield table.whole(f"{name}.kv_a_layernorm.weight", f"{name}.kv_a_layernorm.weight", rank)
    kv_up = f"{name}.kv_b_proj.weight"
    yield table.stacked(kv_up, [(kv_up, heads * (nope + value), heads)], rank)
    yield table.split_columns(f"{name}.o_proj.weight", f"{name}.o_proj.weight", hidden, heads * value)


LAYERS = {"qwen3": _qwen3, "qwen3_moe": _qwen3, "mixtral": _mixtral, "deepseek_v3": _deepseek_v3}
