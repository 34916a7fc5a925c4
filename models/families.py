"""The model families and what each says about names: checkpoint tensors, and any rank's parameters. Pure.

Consumes an HF config as a dict (config.json) and a layout; produces models/tensors.py's nouns. The tables themselves are
in one file per family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.models import deepseek_v3_names, mixtral_names, qwen3_names, unsupported
from mrl.models.hf_config import HfConfig, checkpoint_dtype, field
from mrl.models.layout import Layout, Place, chunk_layers, divide, padded_vocab
from mrl.models.tensors import TRAINER, CheckpointTensor, LocalTensor, Role, Row, Spec, cut, whole

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One family; its name table is `layer`."""

    model_type: str
    layer: Callable[[HfConfig, int, Spec, range], list[Row]]
    """(config, global layer number, spec, global experts of the rank) -> rows named relative to the layer."""
    unsupported: Callable[[HfConfig], list[str]]
    """The keys of a config that training does not implement, as text; planning and names need no more than the table."""
    expert_keys: tuple[str, ...] = ()
    """Config keys that may hold the number of routed experts; empty for dense families."""
    untrained: Callable[[HfConfig], tuple[str, ...]] = lambda hf: ()
    """Prefixes of the checkpoint tensors that a folder may have and that are neither trained nor served."""
    exported: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys that config.json of an exported folder has other values of, because of what is not trained."""

    def num_experts(self, hf_config: HfConfig) -> int:
        """Routed experts per MoE layer; 0 for dense families."""
        return field(hf_config, *self.expert_keys) if self.expert_keys else 0

    def checkpoint_tensors(self, hf_config: HfConfig, *, dtype: str | None = None) -> list[CheckpointTensor]:
        """Every tensor of a Hugging Face folder of `dtype`, the config's when absent (correction biases in float32)."""
        dtype = dtype or checkpoint_dtype(hf_config)
        rows = _ends(hf_config, Layout(), 1)
        experts = range(self.num_experts(hf_config))
        tensors: dict[str, CheckpointTensor] = {}
        for number in range(field(hf_config, "num_hidden_layers")):
            rows.extend(self.layer(hf_config, number, TRAINER, experts))
        for row in rows:
            kind = "float32" if row.role == "correction" else dtype
            for segment in (s for block in row.blocks for s in block):
                end = segment.start + segment.rows
                known = tensors.get(segment.tensor)
                size = max(end, known.shape[0] if known else 0)
                shape = (size,) if row.columns is None else (size, row.columns)
                tensors[segment.tensor] = CheckpointTensor(segment.tensor, shape, kind)
        return list(tensors.values())

    def local_tensors(
        self,
        hf_config: HfConfig,
        layout: Layout,
        place: Place,
        *,
        dtype: str = "bfloat16",
        router_dtype: str | None = None,
        spec: Spec = TRAINER,
        pad_vocab_to: int = 1,
    ) -> list[LocalTensor]:
        """Every parameter (and the router's correction buffer) of one rank, over all its model chunks.

        `router_dtype` is the router weight's own dtype, `dtype` when absent. ConfigError where the layout does not fit.
        """
        kinds: dict[Role, str] = {"weight": dtype, "router": router_dtype or dtype, "correction": "float32"}
        splits = {"none": (1, 0), "tp": (layout.tp, place.tp), "etp": (layout.etp, place.etp)}
        tensors = []
        for chunk, prefix, row in self._rows(hf_config, layout, place, spec, pad_vocab_to):
            parts, index = splits[row.split]
            local = cut(row, parts=parts, index=index, chunk=chunk, dtype=kinds[row.role], prefix=prefix)
            tensors.append(local)
        return tensors

    def _rows(
        self, hf_config: HfConfig, layout: Layout, place: Place, spec: Spec, pad_vocab_to: int
    ) -> Iterator[tuple[int, str, Row]]:
        chunks = chunk_layers(field(hf_config, "num_hidden_layers"), layout, place.pp)
        experts = self._experts(hf_config, layout, place)
        embedding, final_norm, *head = _ends(hf_config, layout, pad_vocab_to)
        for chunk, layers in enumerate(chunks):
            first = chunk == 0 and place.pp == 0
            last = chunk == layout.vpp - 1 and place.pp == layout.pp - 1
            if first:
                yield chunk, "", embedding
            for local, number in enumerate(layers):
                for row in self.layer(hf_config, number, spec, experts):
                    yield chunk, f"decoder.layers.{local}.", row
            if last:
                yield chunk, "", final_norm
            if last and head:
                yield chunk, "", head[0]
            elif last and not first:  # tied: the last stage holds a copy of the embedding
                yield chunk, "", dataclasses.replace(embedding, name="output_layer.weight")

    def _experts(self, hf_config: HfConfig, layout: Layout, place: Place) -> range:
        count = self.num_experts(hf_config)
        if not count and layout.ep * layout.etp > 1:
            raise ConfigError(
                f"{self.model_type} has no experts; ep x etp = {layout.ep} x {layout.etp} must be 1 x 1"
            )
        share = divide(count, layout.ep, what="experts over ep")
        return range(place.ep * share, (place.ep + 1) * share)


def _ends(hf: HfConfig, layout: Layout, pad_vocab_to: int) -> list[Row]:
    """Embedding, final norm, and the output layer unless it is tied."""
    vocab, hidden = field(hf, "vocab_size"), field(hf, "hidden_size")
    padded = padded_vocab(vocab, tp=layout.tp, pad_vocab_to=pad_vocab_to)
    table = whole(EMBEDDING, vocab)
    rows = [
        Row("embedding.word_embeddings.weight", table, hidden, "tp", padded_rows=padded),
        Row("decoder.final_layernorm.weight", whole("model.norm.weight", hidden), None),
    ]
    if not hf.get("tie_word_embeddings", False):
        rows.append(Row("output_layer.weight", whole(HEAD, vocab), hidden, "tp", padded_rows=padded))
    return rows


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", qwen3_names.dense_layer, unsupported.qwen3),
        Family("qwen3_moe", qwen3_names.moe_layer, unsupported.qwen3, ("num_experts", "num_local_experts")),
        Family("mixtral", mixtral_names.layer, unsupported.mixtral, ("num_local_experts",)),
        Family(
            "deepseek_v3",
            deepseek_v3_names.layer,
            unsupported.deepseek_v3,
            ("n_routed_experts", "num_local_experts"),
            deepseek_v3_names.untrained,
            {"num_nextn_predict_layers": 0},
        ),
    )
}


def family_of(hf_config: HfConfig) -> Family:
    """The family of a config.json, by model_type; an unknown one is a ConfigError that lists those known."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} in config.json is not one of {sorted(FAMILIES)}")
    return FAMILIES[model_type]


def require_trainable(hf_config: HfConfig) -> None:
    """ConfigError for an unknown family, or for a config that asks for what training does not implement."""
    family = family_of(hf_config)
    if found := family.unsupported(hf_config):
        raise ConfigError(
            f"config.json says {', '.join(found)}: training does not implement that for {family.model_type}"
        )
