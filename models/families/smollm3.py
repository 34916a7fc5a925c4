"""SmolLM3: a dense decoder whose every fourth layer has no rotary embedding (arXiv 2501.18795).

Source: transformers 5.19, models/smollm3. vLLM 0.32 serves it through transformers' class.
"""

from __future__ import annotations

from typing import Any

from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field


class SmolLM3(Family):
    """SmolLM3 without windows."""

    model_type = "smollm3"
    implemented = {"mlp_bias": (None, False), "use_sliding_window": (None, False)}
    harmless = ("sliding_window", "max_window_layers")
    rope_kinds = ("default", "yarn")

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {"no_rope_freq": [int(not on) for on in rotated(hf)]}


def rotated(hf: HfConfig) -> list[bool]:
    """Return for each layer whether queries and keys are rotated: `no_rope_layers` has 1 if they are."""
    count, interval = field(hf, "num_hidden_layers"), hf.get("no_rope_layer_interval") or 4
    listed = hf.get("no_rope_layers") or [(number + 1) % interval for number in range(count)]
    return [bool(on) for on in listed[:count]]
