"""What a plan knows of a model: its published configuration, exact counts, and sizes per layer. Reads no weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from launch.plan.hardware import CONFIGS
from models.families import Family, family_of
from models.layer_rows import field, head_dim
from models.names import TRANSFORMER_ENGINE, Row
from mrl.config.model import ModelSection
from mrl.errors import ConfigError
from mrl.prepare.new_model import hf_config


@dataclasses.dataclass(frozen=True)
class Facts:
    """One model."""

    hf: dict[str, Any]
    origin: str
    """Where the configuration came from."""

    @property
    def family(self) -> Family:
        return family_of(self.hf)

    @property
    def num_layers(self) -> int:
        return field(self.hf, "num_hidden_layers")

    @property
    def hidden(self) -> int:
        return field(self.hf, "hidden_size")

    @property
    def vocab(self) -> int:
        return field(self.hf, "vocab_size")

    @property
    def num_heads(self) -> int:
        return field(self.hf, "num_attention_heads")

    @property
    def num_experts(self) -> int:
        return self.family.num_experts(self.hf)

    @property
    def top_k(self) -> int:
        """Routed experts a token visits."""
        return field(self.hf, "num_experts_per_tok") if self.num_experts else 0

    @property
    def expert_inner(self) -> int:
        """Inner width of one routed expert; 0 without experts."""
        return field(self.hf, "moe_intermediate_size", "intermediate_size") if self.num_experts else 0

    @property
    def latent_attention(self) -> bool:
        return "kv_lora_rank" in self.hf

    @property
    def kv_heads(self) -> int:
        return field(self.hf, "num_key_value_heads")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache of one token in one layer, over all heads; the latent one is a single row."""
        if self.latent_attention:
            return self.hf["kv_lora_rank"] + self.hf["qk_rope_head_dim"]
        return 2 * self.kv_heads * head_dim(self.hf)

    @property
    def score_width(self) -> int:
        """Widths of keys and values that one query head meets, added: attention costs 2 x heads x this per pair."""
        if self.latent_attention:
            return self.hf["qk_nope_head_dim"] + self.hf["qk_rope_head_dim"] + self.hf["v_head_dim"]
        return 2 * head_dim(self.hf)

    @functools.cached_property
    def _counts(self) -> tuple[int, int]:
        """(elements of the checkpoint, of these in routed experts)."""
        sizes = [(t.name, math.prod(t.shape)) for t in self.family.checkpoint_tensors(self.hf)]
        return sum(size for _, size in sizes), sum(size for name, size in sizes if ".experts." in name)

    @property
    def parameters_total(self) -> int:
        """Elements of the checkpoint, router correction biases included, multi-token-prediction layers not."""
        return self._counts[0]

    @property
    def parameters_routed(self) -> int:
        """Elements of all routed experts."""
        return self._counts[1]

    @property
    def parameters_active(self) -> int:
        """Elements a token meets: all but the routed experts it does not visit."""
        visited = self.parameters_routed * self.top_k // self.num_experts if self.num_experts else 0
        return self.parameters_total - self.parameters_routed + visited

    @functools.cached_property
    def layers(self) -> list[list[Row]]:
        """Rows of each layer with all its experts."""
        experts = range(self.num_experts)
        return [self.family.layer(self.hf, n, TRANSFORMER_ENGINE, experts) for n in range(self.num_layers)]

    def forward_flops(self, tokens: float, mean_length: float) -> float:
        """Operations of one forward pass over tokens in sequences of this mean length (causal: half of the pairs)."""
        lookup = self.vocab * self.hidden
        pairs = tokens * mean_length / 2
        return (
            2 * (self.parameters_active - lookup) * tokens
            + 2 * self.num_layers * self.num_heads * self.score_width * pairs
        )


def row_elements(row: Row) -> int:
    """Elements of an unsplit row, without padding."""
    return sum(s.rows for block in row.blocks for s in block) * (row.columns or 1)


def find_facts(model: ModelSection) -> Facts:
    """The model's config.json: its folder, else what `model.new` makes, else the facts in configs/models."""
    own = Path(model.path) / "config.json"
    published = CONFIGS / "models" / Path(model.path).name / "config.json"
    if own.is_file():
        return _read(own)
    if model.new is not None:
        made = hf_config(model.new, vocab_size=model.new.vocab_size, max_length=model.max_length)
        return Facts(made, "model.new (vocabulary at its largest)")
    if published.is_file():
        return _read(published)
    known = sorted(path.parent.name for path in (CONFIGS / "models").glob("*/config.json"))
    raise ConfigError(
        f"model.path = {model.path} holds no config.json, and configs/models knows only {known}; "
        "give a Hugging Face folder or put the published config.json there"
    )


def _read(path: Path) -> Facts:
    try:
        return Facts(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
