"""A model family: what config.json means, and where tensors lie in the checkpoint, the trainer and an engine.

Loading, export, the trainer's settings, planning and weight sync all ask here; each family is a file in
models/families. This module imports no engine and moves no byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from mrl.errors import ConfigError
from mrl.models import rope, rows
from mrl.models.engine_rows import EngineRows, Shard
from mrl.models.hf_config import (
    COMPRESSED,
    FP8,
    HfConfig,
    checkpoint_dtype,
    field,
    head_dim,
    unsupported_values,
)
from mrl.models.layout import Layout, Place, chunk_layers, divide, padded_vocab
from mrl.models.rows import Experts
from mrl.models.tensors import TRAINER, CheckpointTensor, LocalTensor, Role, Row, Spec, cut, whole
from mrl.reward_labels import has_score, num_heads_of_score

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"


class Family:
    """The defaults: a decoder with RMSNorm before grouped-query attention and before gated MLPs or experts.

    A family names its `model_type` and overrides what it has differently. In every method `hf` is config.json
    as a dict and `layer` the layer's prefix in the checkpoint.
    """

    model_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other model_types under which the same model is published."""
    moe_module: ClassVar[str] = "mlp"
    """The module of a layer that holds its router and experts in the checkpoint."""
    shared_module: ClassVar[str] = "shared_experts"
    """The module beside the experts that every token visits, where a family has one."""
    gated_shared: ClassVar[bool] = False
    """Whether the tensor `{shared_module}_gate` weighs what the shared module adds."""
    correction: ClassVar[str] = ""
    """The tensor in the module of the experts that holds the router's correction biases; absent by itself."""
    engine_router_dtype: ClassVar[str | None] = None
    """What vLLM holds routers in whatever the engine's type; None where it is the engine's."""
    expert_count_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that may hold the number of routed experts; a dense family has none."""
    expert_width_key: ClassVar[str] = "moe_intermediate_size"
    """The key that holds the inner width of one routed expert."""
    projections: ClassVar[Mapping[str, str]] = {part: f"{part}_proj" for part in ("gate", "up", "down")}
    """What the checkpoint calls each matrix of a routed expert."""
    router: ClassVar[Mapping[str, Any]] = {
        "moe_router_score_function": "softmax",
        # of the chosen logits, which is the same as the chosen probabilities divided by their sum
        "moe_router_pre_softmax": False,
    }
    """Megatron's settings of how experts are chosen."""
    prediction_layers: ClassVar[str] = ""
    """The key that holds the number of multi-token-prediction layers, which follow the model's own."""
    fewest_experts_per_token: ClassVar[int] = 1
    """The fewest experts that a token may visit in training."""
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The values that training implements of keys that would change the computation."""
    harmless: ClassVar[tuple[str, ...]] = ()
    """The keys of config.json that change nothing of this family's models as training implements them."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """The kinds of layers in `layer_types` that training implements."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default",)
    """The rotary embeddings that training implements."""
    quantised: ClassVar[tuple[str, ...]] = (FP8, COMPRESSED)
    """The methods by which a folder's weights may be quantised; training reads them as what they mean."""
    partial_rotary: ClassVar[bool] = False
    """Whether config.json may say that only a share of each head is turned."""
    output_gate: ClassVar[bool] = False
    """Whether the projection to queries also gives a gate of each head's output."""
    own_attention: ClassVar[bool] = False
    """Whether only our own attention computes the models' (attention sinks): their layers are never Transformer Engine's."""
    carried: ClassVar[tuple[str, ...]] = ()
    """The prefixes of a folder's tensors that nobody trains or serves and that an export has as the folder has
    them."""
    engine_class: ClassVar[str] = ""
    """The class by which vLLM serves the model of text, where folders name one that holds a model of images too."""
    exported: ClassVar[Mapping[str, Any]] = {}
    """The keys that config.json of an exported folder has other values of, because of what is not trained."""

    # What config.json means

    def num_experts(self, hf: HfConfig) -> int:
        """The number of routed experts of an MoE layer; 0 for dense families."""
        return field(hf, *self.expert_count_keys) if self.expert_count_keys else 0

    def is_moe_layer(self, hf: HfConfig, number: int) -> bool:
        """Whether a layer has experts."""
        return bool(self.expert_count_keys)

    def is_delta_net(self, hf: HfConfig, number: int) -> bool:
        """Whether a layer has a gated delta net in its attention's place."""
        return False

    def qk_norm(self, hf: HfConfig) -> bool:
        """Whether each head's queries and keys have norms."""
        return False

    def qkv_bias(self, hf: HfConfig) -> bool:
        """Whether the projections to queries, keys and values have biases; ConfigError where config.json asks
        for some that the family does not implement."""
        if hf.get("attention_bias"):
            raise ConfigError(f"attention_bias = true: {self.model_type} is implemented without biases")
        return False

    def shared_width(self, hf: HfConfig) -> int:
        """The inner width of the experts that every token visits, which are one MLP; 0 without."""
        return 0

    def untrained(self, hf: HfConfig) -> tuple[str, ...]:
        """The prefixes of checkpoint tensors that a folder may have and that nobody trains, serves or exports."""
        numbers = range(hf.get(self.prediction_layers) or 0)
        return tuple(f"model.layers.{field(hf, 'num_hidden_layers') + number}." for number in numbers)

    def unsupported(self, hf: HfConfig) -> list[str]:
        """What config.json asks for and training does not implement, as text; planning does not ask."""
        problems = unsupported_values(hf, self.implemented, self.quantised)
        least = self.fewest_experts_per_token
        if least > 1 and (count := field(hf, "num_experts_per_tok")) < least:
            problems.append(f"num_experts_per_tok = {count} (only {least} and more)")
        if others := sorted(set(hf.get("layer_types") or ()) - set(self.layer_kinds)):
            problems.append(f"layer_types with {', '.join(others)} (only {' or '.join(self.layer_kinds)})")
        return problems + rope.unsupported(hf, self.rope_kinds, partial=self.partial_rotary)

    def require_layout(self, hf: HfConfig, layout: Layout) -> None:
        """Raise ConfigError for a training layout in which the family is not implemented."""

    def rotary(self, hf: HfConfig) -> rope.Rope:
        """The rotary embedding; over the first part of each head where config.json says so."""
        return rope.rope(hf, width=int(head_dim(hf) * rope.turned_share(hf)))

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        """The arguments of megatron's TransformerConfig that describe the model (not the layout)."""
        fields = {
            "num_layers": field(hf, "num_hidden_layers"),
            "hidden_size": field(hf, "hidden_size"),
            "num_attention_heads": field(hf, "num_attention_heads"),
            "num_query_groups": field(hf, "num_key_value_heads"),
            "kv_channels": head_dim(hf),
            "qk_layernorm": self.qk_norm(hf),
            "add_qkv_bias": self.qkv_bias(hf),
            "attention_output_gate": self.output_gate,
            "ffn_hidden_size": field(hf, "intermediate_size", self.expert_width_key),
            "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "init_method_std": hf.get("initializer_range", 0.02),
        }
        if self.expert_count_keys:
            pattern = [int(self.is_moe_layer(hf, layer)) for layer in range(fields["num_layers"])]
            fields |= {
                "num_moe_experts": self.num_experts(hf),
                "moe_ffn_hidden_size": field(hf, self.expert_width_key),
                "moe_layer_freq": 1 if all(pattern) else pattern,
                "moe_router_topk": field(hf, "num_experts_per_tok"),
                "moe_shared_expert_intermediate_size": self.shared_width(hf) or None,
                "moe_shared_expert_gate": self.gated_shared,
                **self.router,
            }
        return fields

    # Where tensors lie

    def expert_name(self, layer: str, expert: int, part: str) -> str:
        """The checkpoint tensor of one expert's "gate", "up" or "down" projection."""
        return f"{layer}.{self.moe_module}.experts.{expert}.{self.projections[part]}.weight"

    def experts(self, hf: HfConfig, layer: str) -> Experts:
        """All routed experts of an MoE layer."""
        hidden, inner = field(hf, "hidden_size"), field(hf, self.expert_width_key)
        return Experts(
            self.num_experts(hf), hidden, inner, lambda expert, part: self.expert_name(layer, expert, part)
        )

    def layer(self, hf: HfConfig, number: int, spec: Spec, own_experts: range) -> list[Row]:
        """The rows of layer `number` of the model with the experts of one rank, named relative to the layer."""
        layer = f"model.layers.{number}"
        if moe := self.is_moe_layer(hf, number):
            mlp = self.moe_rows(hf, layer, spec, own_experts)
        else:
            hidden, inner = field(hf, "hidden_size"), field(hf, "intermediate_size")
            mlp = rows.gated_mlp(
                "mlp", lambda part: f"{layer}.mlp.{part}_proj.weight", hidden=hidden, inner=inner
            )
        mlp_norm = rows.mlp_norm(hf, layer, folded=spec.fold_norms and not moe)
        return [*self.attention_rows(hf, layer, spec), mlp_norm, *mlp]

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[Row]:
        """The attention of one layer and the norm before it."""
        norm = rows.input_norm(hf, layer, folded=spec.fold_norms)
        return [norm, *rows.grouped_query_attention(hf, layer, **self._attention(hf))]

    def _attention(self, hf: HfConfig) -> dict[str, bool]:
        """What grouped-query attention has."""
        return {"qk_norm": self.qk_norm(hf), "qkv_bias": self.qkv_bias(hf), "gated": self.output_gate}

    def moe_rows(self, hf: HfConfig, layer: str, spec: Spec, own: range) -> list[Row]:
        """The router of one layer, its correction biases, the experts of one rank, and the shared experts as one
        MLP with its gate."""
        module, experts = f"{layer}.{self.moe_module}", self.experts(hf, layer)
        weight = whole(f"{module}.gate.weight", experts.count)
        result = [Row("mlp.router.weight", weight, experts.hidden)]
        if self.correction:
            biases = whole(f"{module}.{self.correction}", experts.count)
            result.append(Row("mlp.router.expert_bias", biases, None, role="correction"))
        result += rows.expert_mlps(experts, own, spec)
        if inner := self.shared_width(hf):
            shared = f"{module}.{self.shared_module}"
            result += rows.gated_mlp(
                "mlp.shared_experts",
                lambda part: f"{shared}.{part}_proj.weight",
                hidden=experts.hidden,
                inner=inner,
            )
            if self.gated_shared:
                gate = whole(f"{shared}_gate.weight", 1)
                result.append(Row("mlp.shared_experts.gate_weight", gate, experts.hidden))
        return result

    def engine_layer(self, hf: HfConfig, number: int, engine: EngineRows) -> Iterator[LocalTensor]:
        """What a rank of a vLLM engine holds of one layer."""
        layer, hidden = f"model.layers.{number}", field(hf, "hidden_size")
        yield from self.engine_attention(hf, layer, engine)
        if self.is_moe_layer(hf, number):
            yield from self.engine_moe(hf, layer, engine)
        else:
            yield from engine.gated_mlp(f"{layer}.mlp", hidden=hidden, inner=field(hf, "intermediate_size"))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield engine.whole(f"{layer}.{norm}.weight", hidden)

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """What a rank of a vLLM engine holds of one layer's attention."""
        return engine.grouped_query_attention(hf, layer, **self._attention(hf))

    def engine_moe(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """What a rank of a vLLM engine holds of one layer's router, routed and shared experts."""
        module, experts = f"{layer}.{self.moe_module}", self.experts(hf, layer)
        router = f"{module}.gate.weight"
        yield engine.whole(router, experts.count, experts.hidden, dtype=self.engine_router_dtype)
        if self.correction:
            yield engine.whole(f"{module}.{self.correction}", experts.count, dtype="float32")
        if inner := self.shared_width(hf):
            shared = f"{module}.{self.shared_module}"
            if self.gated_shared:
                yield engine.whole(f"{shared}_gate.weight", 1, experts.hidden)
            yield from engine.gated_mlp(shared, hidden=experts.hidden, inner=inner)
        yield from engine.experts(f"{module}.experts", experts)

    # What others ask for

    def checkpoint_tensors(self, hf: HfConfig, *, dtype: str | None = None) -> list[CheckpointTensor]:
        """Every tensor of a Hugging Face folder of `dtype`, the config's when absent (correction biases in
        float32)."""
        dtype = dtype or checkpoint_dtype(hf)
        all_rows, experts = outer_rows(hf, Layout()), range(self.num_experts(hf))
        for number in range(field(hf, "num_hidden_layers")):
            all_rows.extend(self.layer(hf, number, TRAINER, experts))
        tensors: dict[str, CheckpointTensor] = {}
        for row in all_rows:
            row_dtype = "float32" if row.role == "correction" else dtype
            for segment in (s for block in row.blocks for s in block):
                before = tensors.get(segment.tensor)
                size = max(segment.start + segment.rows, before.shape[0] if before else 0)
                tensors[segment.tensor] = CheckpointTensor(
                    segment.tensor, (size, *row.trailing), row_dtype, row.stack
                )
        return list(tensors.values())

    def local_tensors(
        self,
        hf: HfConfig,
        layout: Layout,
        place: Place,
        *,
        dtype: str = "bfloat16",
        spec: Spec = TRAINER,
    ) -> list[LocalTensor]:
        """Every parameter (and the router's correction buffer) of one trainer rank, over all its model
        chunks; ConfigError where the layout does not fit."""
        self.require_layout(hf, layout)
        dtypes: dict[Role, str] = {"weight": dtype, "correction": "float32"}
        splits = {"none": (1, 0), "tp": (layout.tp, place.tp), "etp": (layout.etp, place.etp)}
        tensors = []
        for chunk, prefix, row in self.local_rows(hf, layout, place, spec):
            parts, index = splits[row.split]
            tensors.append(
                cut(row, parts=parts, index=index, chunk=chunk, dtype=dtypes[row.role], prefix=prefix)
            )
        return tensors

    def engine_tensors(self, hf: HfConfig, shard: Shard, *, dtype: str = "bfloat16") -> list[LocalTensor]:
        """Every parameter of one engine rank; ConfigError where vLLM would refuse the split."""
        engine = EngineRows(shard, dtype)
        hidden, vocab = field(hf, "hidden_size"), field(hf, "vocab_size")
        tensors = [engine.vocabulary(EMBEDDING, vocab, hidden)]
        for number in range(field(hf, "num_hidden_layers")):
            tensors.extend(self.engine_layer(hf, number, engine))
        tensors.append(engine.whole(FINAL_NORM, hidden))
        if not hf.get("tie_word_embeddings", False):
            tensors.append(engine.vocabulary(HEAD, vocab, hidden))
        return tensors

    def local_rows(
        self, hf: HfConfig, layout: Layout, place: Place, spec: Spec
    ) -> Iterator[tuple[int, str, Row]]:
        """(model chunk, prefix of the name, row) of everything that a trainer rank holds."""
        chunks = chunk_layers(field(hf, "num_hidden_layers"), layout, place.pp)
        experts = _own_experts(self, hf, layout, place)
        embedding, final_norm, *head = outer_rows(hf, layout)
        for chunk, layers in enumerate(chunks):
            first = chunk == 0 and place.pp == 0
            last = chunk == layout.vpp - 1 and place.pp == layout.pp - 1
            if first:
                yield chunk, "", embedding
            for local, number in enumerate(layers):
                for row in self.layer(hf, number, spec, experts):
                    yield chunk, f"decoder.layers.{local}.", row
            if last:
                yield chunk, "", final_norm
            if last and head:
                yield chunk, "", head[0]
            elif last and not first:  # tied: the last stage holds a copy of the embedding
                yield chunk, "", dataclasses.replace(embedding, name="output_layer.weight")


def outer_rows(hf: HfConfig, layout: Layout) -> list[Row]:
    """The embedding, the final norm, and the output layer unless it is tied; of a reward model the heads of its score."""
    vocab, hidden = field(hf, "vocab_size"), field(hf, "hidden_size")
    padded = padded_vocab(vocab, multiple=layout.tp)
    outer = [
        Row("embedding.word_embeddings.weight", whole(EMBEDDING, vocab), hidden, "tp", padded_rows=padded),
        Row("decoder.final_layernorm.weight", whole(FINAL_NORM, hidden), None),
    ]
    tied = hf.get("tie_word_embeddings", False)
    if has_score(hf):
        outer.append(Row("output_layer.weight", whole(SCORE, num_heads_of_score(hf)), hidden))
    elif not tied:
        outer.append(Row("output_layer.weight", whole(HEAD, vocab), hidden, "tp", padded_rows=padded))
    return outer


def _own_experts(family: Family, hf: HfConfig, layout: Layout, place: Place) -> range:
    count = family.num_experts(hf)
    if not count and layout.ep * layout.etp > 1:
        raise ConfigError(
            f"{family.model_type} has no experts; ep x etp = {layout.ep} x {layout.etp} must be 1 x 1"
        )
    share = divide(count, layout.ep, what="experts over ep")
    return range(place.ep * share, (place.ep + 1) * share)
