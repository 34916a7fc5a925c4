"""Ministral 3 and other Mistral models in multimodal folders (Mistral Small 3.1 and 3.2): Llama's layers,
YaRN, queries that grow with their position.

Only text is trained and served; exports copy the image model unchanged. Source: transformers 5.19,
models/{ministral3,mistral3}; vLLM 0.32, model_executor/models/mistral.py, which takes the growth of queries
from a key of Mistral's own format.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.models import rope
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field

_BETA = "llama_4_scaling_beta"


class Ministral3(Family):
    """Ministral 3, alone or beside images."""

    model_type = "mistral3"
    aliases = ("ministral3",)
    engine_class = "MistralForCausalLM"
    implemented = {"sliding_window": (None,)}
    harmless = (
        "vision_config", "image_token_index", "image_token_id", "spatial_merge_size", "vision_feature_layer",
        "projector_hidden_act", "multimodal_projector_bias",
    )  # fmt: skip
    rope_kinds = ("default", "yarn")
    rope_keys = (_BETA, "max_position_embeddings")
    copied_prefixes = ("vision_tower.", "multi_modal_projector.")

    def rotary(self, hf: HfConfig) -> rope.Rope:
        return dataclasses.replace(super().rotary(hf), query_growth=_growth(hf))

    def engine_overrides(self, hf: HfConfig) -> dict[str, Any]:
        growth = _growth(hf)
        if growth is None:
            return {}
        scaling = {"beta": growth.beta, "original_max_position_embeddings": growth.length}
        return {"llama_4_scaling": scaling}


def _growth(hf: HfConfig) -> rope.QueryGrowth | None:
    settings = rope.rope_settings(hf)
    if not settings.get(_BETA):
        return None
    return rope.QueryGrowth(settings[_BETA], field(settings, "original_max_position_embeddings"))
