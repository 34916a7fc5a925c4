"""Qwen3-Next: most layers are gated delta nets, the others gated attention; norms except the delta nets'
store their factor minus 1.

Source: transformers 5.19, models/qwen3_next. The draft head is not trained or served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.models import delta_net, rows
from mrl.models.delta_net import DeltaNet
from mrl.models.engine_rows import EngineRows
from mrl.models.families.qwen3 import Qwen3Moe
from mrl.models.hf_config import HfConfig, field
from mrl.models.layout import Layout, divide
from mrl.models.tensors import CheckpointRows, LocalTensor, ParameterRows, Spec


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next."""

    model_type = "qwen3_next"
    shared_module = "shared_expert"
    gated_shared = True
    partial_rotary = True
    output_gate = True
    layer_kinds = ("linear_attention", "full_attention")
    harmless = (*Qwen3Moe.harmless, "full_attention_interval", "num_nextn_predict_layers")
    without_drafts = {"num_nextn_predict_layers": 0}

    def is_delta_net(self, hf: HfConfig, number: int) -> bool:
        """Return True for a delta net, by `layer_types` or all but every `full_attention_interval`-th."""
        if types := hf.get("layer_types"):
            return types[number] == "linear_attention"
        return (number + 1) % (hf.get("full_attention_interval") or 4) != 0

    def shared_width(self, hf: HfConfig) -> int:
        return hf.get("shared_expert_intermediate_size") or 0

    def draft_prefixes(self, hf: HfConfig) -> tuple[str, ...]:
        return ("mtp.",)

    def require_layout(self, hf: HfConfig, layout: Layout) -> None:
        divide(
            field(hf, "linear_num_key_heads"),
            layout.tp * layout.cp,
            name="key heads of delta nets over tp x cp",
        )

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        net, layers = delta_net.delta_net(hf), range(field(hf, "num_hidden_layers"))
        return super().transformer_fields(hf) | {
            "layernorm_zero_centered_gamma": True,
            "linear_attention_freq": [int(self.is_delta_net(hf, number)) for number in layers],
            "linear_num_key_heads": net.key_heads,
            "linear_num_value_heads": net.value_heads,
            "linear_key_head_dim": net.key_width,
            "linear_value_head_dim": net.value_width,
            "linear_conv_kernel_dim": net.filter_width,
        }

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[ParameterRows]:
        if not self.is_delta_net(hf, _number(layer)):
            return super().attention_rows(hf, layer, spec)
        net, name = delta_net.delta_net(hf), f"{layer}.linear_attn"
        projected = [segment for head in range(net.key_heads) for segment in self.projected(net, name, head)]
        norm = rows.input_norm(hf, layer, folded=False)
        return [norm, *delta_net.trainer_rows(net, name, field(hf, "hidden_size"), projected)]

    def projected(self, net: DeltaNet, name: str, head: int) -> list[CheckpointRows]:
        """Return a key head's query, key, values, gates, then its b and a; both tensors are by key head."""
        wide, narrow = 2 * net.key_width + 2 * net.share * net.value_width, 2 * net.share
        return [
            CheckpointRows(f"{name}.in_proj_qkvz.weight", head * wide, wide),
            CheckpointRows(f"{name}.in_proj_ba.weight", head * narrow, narrow),
        ]

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        if not self.is_delta_net(hf, _number(layer)):
            return super().engine_attention(hf, layer, engine)
        net, name = delta_net.delta_net(hf), f"{layer}.linear_attn"
        return delta_net.engine_rows(
            net, name, field(hf, "hidden_size"), engine, self.engine_projections(net, name)
        )

    def engine_projections(self, net: DeltaNet, name: str) -> dict[str, list[CheckpointRows]]:
        """Return vLLM's projections of a delta net, each as sections that are split over tp separately."""
        sizes = {"in_proj_qkvz": 2 * net.keys + 2 * net.values, "in_proj_ba": 2 * net.value_heads}
        return {
            projection: [CheckpointRows(f"{name}.{projection}.weight", 0, rows)]
            for projection, rows in sizes.items()
        }


def _number(layer: str) -> int:
    """Return the number at the end of a layer's name."""
    return int(layer.rpartition(".")[2])
