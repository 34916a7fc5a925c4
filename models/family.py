"""Define a model family: what config.json means, and where tensors are in checkpoint, trainer and engine.

Loading, export, the trainer's settings, planning and weight sync use it; each family is a file in
models/families. This module imports no engine and moves no data.
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
from mrl.models.layout import Layout, RankCoordinates, chunk_layers, divide, padded_vocab
from mrl.models.rows import Experts
from mrl.models.tensors import (
    TRAINER,
    CheckpointTensor,
    LocalTensor,
    ParameterRows,
    Role,
    Spec,
    shard_row,
    whole_tensor,
)
from mrl.reward_labels import has_score, num_heads_of_score

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
DRAFTS = "drafts."
"""Prefix of the trainer's names of a draft head's parameters."""


class Family:
    """A decoder with RMSNorm before grouped-query attention and before gated MLPs or experts (the defaults).

    A family sets its `model_type` and overrides what differs. In every method `hf` is config.json as a dict
    and `layer` the layer's prefix in the checkpoint.
    """

    model_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other model_types under which the same model is published."""
    moe_module: ClassVar[str] = "mlp"
    """Module of a layer that contains its router and experts in the checkpoint."""
    shared_module: ClassVar[str] = "shared_experts"
    """Module next to the experts that every token visits, if the family has one."""
    gated_shared: ClassVar[bool] = False
    """True if the tensor `{shared_module}_gate` weights the shared module's output."""
    correction: ClassVar[str] = ""
    """Tensor in the experts' module with the router's correction biases; empty: none."""
    engine_router_dtype: ClassVar[str | None] = None
    """vLLM's dtype of routers; None: the engine's."""
    expert_count_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that may contain the number of routed experts; empty for a dense family."""
    expert_width_key: ClassVar[str] = "moe_intermediate_size"
    """Key of the inner width of one routed expert."""
    turned_experts: ClassVar[bool] = False
    """True if folders that pack a layer's experts into one tensor store each transposed."""
    projections: ClassVar[Mapping[str, str]] = {part: f"{part}_proj" for part in ("gate", "up", "down")}
    """Matrix of a routed expert -> its checkpoint name."""
    router: ClassVar[Mapping[str, Any]] = {
        "moe_router_score_function": "softmax",
        # softmax over the chosen logits, which equals the chosen probabilities divided by their sum
        "moe_router_pre_softmax": False,
    }
    """Megatron's settings of the routing."""
    prediction_layers: ClassVar[str] = ""
    """Key of the number of draft heads (multi-token prediction), layers that follow the model's own."""
    draft_copies: ClassVar[Mapping[str, str]] = {}
    """End of a draft head's tensor name -> the model's tensor that it is a copy of, as engines assume."""
    fewest_experts_per_token: ClassVar[int] = 1
    """Minimum of experts per token in training."""
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Key -> values that training implements, for keys that would change the computation."""
    harmless: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that do not affect this family's models as training implements them."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Kinds in `layer_types` that training implements."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default",)
    """Rotary embeddings that training implements."""
    rope_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the rotary settings that the family reads, or that change nothing."""
    quantised: ClassVar[tuple[str, ...]] = (FP8, COMPRESSED)
    """Quantisation methods of folders that training can read; it dequantises the weights."""
    partial_rotary: ClassVar[bool] = False
    """True if config.json may rotate only a share of each head."""
    output_gate: ClassVar[bool] = False
    """True if the query projection also gives a gate of each head's output."""
    needs_own_attention: ClassVar[bool] = False
    """True if only our own attention fits (attention sinks), so layers never use Transformer Engine."""
    copied_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of folder tensors that are not trained or served; an export copies them unchanged."""
    engine_class: ClassVar[str] = ""
    """vLLM's class of the text model, if folders name the class of a multimodal one."""
    draft_names: ClassVar[Mapping[str, str]] = {}
    """Part of a draft head besides its layer -> its name in folders, in the layer; empty: not trainable."""
    without_drafts: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json that an export without draft heads changes, if it has them."""

    # What config.json means

    def num_experts(self, hf: HfConfig) -> int:
        """Return the number of routed experts of an MoE layer; 0 for dense families."""
        return field(hf, *self.expert_count_keys) if self.expert_count_keys else 0

    def is_moe_layer(self, hf: HfConfig, number: int) -> bool:
        """Return True if a layer has experts."""
        return bool(self.expert_count_keys)

    def is_delta_net(self, hf: HfConfig, number: int) -> bool:
        """Return True if a layer has a gated delta net instead of attention."""
        return False

    def num_delta_nets(self, hf: HfConfig) -> int:
        """Return the number of layers with a gated delta net."""
        return sum(self.is_delta_net(hf, number) for number in range(field(hf, "num_hidden_layers")))

    def qk_norm(self, hf: HfConfig) -> bool:
        """Return True if each head's queries and keys have norms."""
        return False

    def qkv_bias(self, hf: HfConfig) -> bool:
        """Return True if the QKV projections have biases. Raises ConfigError for biases not implemented."""
        if hf.get("attention_bias"):
            raise ConfigError(f"attention_bias = true is not implemented for {self.model_type}")
        return False

    def shared_width(self, hf: HfConfig) -> int:
        """Return the inner width of the shared experts, which are one MLP; 0 without."""
        return 0

    def draft_prefixes(self, hf: HfConfig) -> tuple[str, ...]:
        """Return prefixes of the tensors of draft heads, which a folder may have. Engines leave them out, the
        trainer unless training.drafts = trained; an export has them."""
        numbers = range(hf.get(self.prediction_layers) or 0)
        return tuple(f"model.layers.{field(hf, 'num_hidden_layers') + number}." for number in numbers)

    def unsupported(self, hf: HfConfig) -> list[str]:
        """List what config.json requires and training does not implement; planning does not check it."""
        problems = unsupported_values(hf, self.implemented, self.quantised)
        least = self.fewest_experts_per_token
        if least > 1 and (count := field(hf, "num_experts_per_tok")) < least:
            problems.append(f"num_experts_per_tok = {count} (supported: {least} and more)")
        if others := sorted(set(hf.get("layer_types") or ()) - set(self.layer_kinds)):
            problems.append(
                f"layer_types with {', '.join(others)} (supported: {', '.join(self.layer_kinds)})"
            )
        return problems + rope.unsupported(
            hf, self.rope_kinds, partial=self.partial_rotary, keys=self.rope_keys
        )

    def engine_overrides(self, hf: HfConfig) -> dict[str, Any]:
        """Return the keys of config.json that an engine's text model needs in another form."""
        return {}

    def require_layout(self, hf: HfConfig, layout: Layout) -> None:
        """Raise ConfigError for a training layout in which the family is not implemented."""

    def rotary(self, hf: HfConfig) -> rope.Rope:
        """Return the rotary embedding, over the first part of each head if config.json says so."""
        return rope.rope(hf, width=int(head_dim(hf) * rope.rotary_share(hf)))

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        """Return the arguments of Megatron's TransformerConfig that describe the model (not the layout)."""
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

    # Where tensors are

    def expert_name(self, layer: str, expert: int, part: str) -> str:
        """Return the checkpoint tensor of one expert's "gate", "up" or "down" projection."""
        return f"{layer}.{self.moe_module}.experts.{expert}.{self.projections[part]}.weight"

    def experts(self, hf: HfConfig, layer: str) -> Experts:
        """Return all routed experts of an MoE layer."""
        hidden, inner = field(hf, "hidden_size"), field(hf, self.expert_width_key)
        return Experts(
            self.num_experts(hf), hidden, inner, lambda expert, part: self.expert_name(layer, expert, part)
        )

    def layer(self, hf: HfConfig, number: int, spec: Spec, own_experts: range) -> list[ParameterRows]:
        """Return the rows of layer `number` with the experts of one rank, named relative to the layer."""
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

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[ParameterRows]:
        """Return the rows of one layer's attention and of the norm before it."""
        norm = rows.input_norm(hf, layer, folded=spec.fold_norms)
        return [norm, *rows.grouped_query_attention(hf, layer, **_attention(self, hf))]

    def moe_rows(self, hf: HfConfig, layer: str, spec: Spec, numbers: range) -> list[ParameterRows]:
        """Return the rows of the router, its correction biases, a rank's experts, and the shared MLP."""
        module, experts = f"{layer}.{self.moe_module}", self.experts(hf, layer)
        weight = whole_tensor(f"{module}.gate.weight", experts.count)
        result = [ParameterRows("mlp.router.weight", weight, experts.hidden)]
        if self.correction:
            biases = whole_tensor(f"{module}.{self.correction}", experts.count)
            result.append(ParameterRows("mlp.router.expert_bias", biases, None, role="correction"))
        result += rows.expert_mlps(experts, numbers, spec)
        if inner := self.shared_width(hf):
            shared = f"{module}.{self.shared_module}"
            result += rows.gated_mlp(
                "mlp.shared_experts",
                lambda part: f"{shared}.{part}_proj.weight",
                hidden=experts.hidden,
                inner=inner,
            )
            if self.gated_shared:
                gate = whole_tensor(f"{shared}_gate.weight", 1)
                result.append(ParameterRows("mlp.shared_experts.gate_weight", gate, experts.hidden))
        return result

    def engine_layer(self, hf: HfConfig, number: int, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the tensors of one layer on a rank of a vLLM engine."""
        layer, hidden = f"model.layers.{number}", field(hf, "hidden_size")
        yield from self.engine_attention(hf, layer, engine)
        if self.is_moe_layer(hf, number):
            yield from self.engine_moe(hf, layer, engine)
        else:
            yield from engine.gated_mlp(f"{layer}.mlp", hidden=hidden, inner=field(hf, "intermediate_size"))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield engine.whole(f"{layer}.{norm}.weight", hidden)

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the tensors of one layer's attention on a rank of a vLLM engine."""
        return engine.grouped_query_attention(hf, layer, **_attention(self, hf))

    def engine_moe(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the tensors of one layer's router, routed and shared experts on a rank of a vLLM engine."""
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

    # What other modules use

    def checkpoint_tensors(
        self, hf: HfConfig, *, dtype: str | None = None, drafts: bool = False
    ) -> list[CheckpointTensor]:
        """Return every tensor of a folder in `dtype` (default: the config's); correction biases float32. With
        `drafts` also those of its draft head that can be trained."""
        dtype = dtype or checkpoint_dtype(hf)
        all_rows, experts = outer_rows(hf, Layout()), range(self.num_experts(hf))
        for number in range(field(hf, "num_hidden_layers")):
            all_rows.extend(self.layer(hf, number, TRAINER, experts))
        all_rows += draft_rows(self, hf, TRAINER, experts) if drafts else []
        tensors: dict[str, CheckpointTensor] = {}
        for row in all_rows:
            row_dtype = "float32" if row.role == "correction" else dtype
            for segment in (s for block in row.blocks for s in block):
                previous = tensors.get(segment.tensor)
                size = max(segment.start + segment.rows, previous.shape[0] if previous else 0)
                tensors[segment.tensor] = CheckpointTensor(
                    segment.tensor, (size, *row.trailing), row_dtype, row.stack, self.turned_experts
                )
        return list(tensors.values())

    def local_tensors(
        self,
        hf: HfConfig,
        layout: Layout,
        place: RankCoordinates,
        *,
        dtype: str = "bfloat16",
        spec: Spec = TRAINER,
        drafts: bool = False,
    ) -> list[LocalTensor]:
        """Return every parameter (and the router's correction buffer) of one trainer rank, over all its model
        chunks; with `drafts` also a trained draft head's. Raises ConfigError if the layout does not fit."""
        self.require_layout(hf, layout)
        dtypes: dict[Role, str] = {"weight": dtype, "correction": "float32"}
        splits = {"none": (1, 0), "tp": (layout.tp, place.tp), "etp": (layout.etp, place.etp)}
        tensors = []
        for chunk, prefix, row in self.local_rows(hf, layout, place, spec, drafts=drafts):
            parts, index = splits[row.split]
            tensors.append(
                shard_row(row, parts=parts, index=index, chunk=chunk, dtype=dtypes[row.role], prefix=prefix)
            )
        return tensors

    def engine_tensors(self, hf: HfConfig, shard: Shard, *, dtype: str = "bfloat16") -> list[LocalTensor]:
        """Return every parameter of one engine rank. Raises ConfigError if vLLM would refuse the split."""
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
        self, hf: HfConfig, layout: Layout, place: RankCoordinates, spec: Spec, *, drafts: bool = False
    ) -> Iterator[tuple[int, str, ParameterRows]]:
        """Yield (model chunk, prefix of the name, row) of every parameter of a trainer rank."""
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
            elif last and not first:  # tied: the last stage has a copy of the embedding
                yield chunk, "", dataclasses.replace(embedding, name="output_layer.weight")
            if last and drafts:
                for row in draft_rows(self, hf, spec, experts):
                    yield chunk, DRAFTS, row


def _attention(family: Family, hf: HfConfig) -> dict[str, bool]:
    return {"qk_norm": family.qk_norm(hf), "qkv_bias": family.qkv_bias(hf), "gated": family.output_gate}


def require_draft_head(family: Family, hf: HfConfig) -> None:
    """Raise ConfigError unless the model has one draft head, of a form that training implements."""
    count = hf.get(family.prediction_layers) or 0
    if not family.draft_names:
        raise ConfigError(
            f"training.drafts = trained is not implemented for {hf['model_type']}; set it to frozen"
        )
    tied = bool(hf.get("tie_word_embeddings", False))
    if count != 1 or tied:
        raise ConfigError(
            f"training.drafts = trained needs one draft head, and an output layer apart from the embedding; "
            f"config.json has {family.prediction_layers} = {count} and tie_word_embeddings = "
            f"{str(tied).lower()}; set it to frozen"
        )


def draft_rows(family: Family, hf: HfConfig, spec: Spec, own_experts: range) -> list[ParameterRows]:
    """Return the rows of the draft head with the experts of one rank, named relative to the head."""
    number, hidden = field(hf, "num_hidden_layers"), field(hf, "hidden_size")
    parts = [
        ParameterRows(
            f"{part}.weight",
            whole_tensor(f"model.layers.{number}.{name}.weight", hidden),
            2 * hidden if part == "projection" else None,
        )
        for part, name in family.draft_names.items()
    ]
    layer = family.layer(hf, number, spec, own_experts)
    return [*parts, *(dataclasses.replace(row, name=f"layer.{row.name}") for row in layer)]


def outer_rows(hf: HfConfig, layout: Layout) -> list[ParameterRows]:
    """Return the embedding, the final norm, and the untied output layer or a reward model's score heads."""
    vocab, hidden = field(hf, "vocab_size"), field(hf, "hidden_size")
    padded = padded_vocab(vocab, multiple=layout.tp)
    outer = [
        ParameterRows(
            "embedding.word_embeddings.weight",
            whole_tensor(EMBEDDING, vocab),
            hidden,
            "tp",
            padded_rows=padded,
        ),
        ParameterRows("decoder.final_layernorm.weight", whole_tensor(FINAL_NORM, hidden), None),
    ]
    tied = hf.get("tie_word_embeddings", False)
    if has_score(hf):
        outer.append(
            ParameterRows("output_layer.weight", whole_tensor(SCORE, num_heads_of_score(hf)), hidden)
        )
    elif not tied:
        outer.append(
            ParameterRows("output_layer.weight", whole_tensor(HEAD, vocab), hidden, "tp", padded_rows=padded)
        )
    return outer


def _own_experts(family: Family, hf: HfConfig, layout: Layout, place: RankCoordinates) -> range:
    count = family.num_experts(hf)
    if not count and layout.ep * layout.etp > 1:
        raise ConfigError(
            f"ep x etp = {layout.ep} x {layout.etp} must be 1 x 1, because {family.model_type} has no experts"
        )
    share = divide(count, layout.ep, name="experts over ep")
    return range(place.ep * share, (place.ep + 1) * share)
