"""Qwen3.5, dense and MoE: Qwen3-Next's layers with differently merged projections, in multimodal folders.

Only text is trained and served; exports copy the image model unchanged. Text has the same position in all
three sections of the rotary embedding, which is therefore a plain one. Source: transformers 5.19,
models/{qwen3_5,qwen3_5_moe}; vLLM 0.32, model_executor/models/qwen3_5.py.
"""

from __future__ import annotations

from typing import Any

from mrl.models.delta_net import DeltaNet, sections
from mrl.models.families.qwen3 import IMAGE_KEYS
from mrl.models.families.qwen3_next import Qwen3Next
from mrl.models.hf_config import HfConfig
from mrl.models.tensors import CheckpointRows


class Qwen35(Qwen3Next):
    """Dense Qwen3.5."""

    model_type = "qwen3_5"
    aliases = ("qwen3_5_text",)
    engine_class = "Qwen3_5ForCausalLM"
    expert_count_keys = ()
    implemented = {
        **Qwen3Next.implemented,
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "silu", "swish"),
        "norm_topk_prob": (None, True),
    }
    harmless = (
        *Qwen3Next.harmless,
        *IMAGE_KEYS,
        "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
        "mamba_ssm_dtype",  # dtype of an engine's states, which reads it itself
        "mlp_only_layers",
        "language_model_only",
    )  # fmt: skip
    rope_kinds = ("default",)
    without_drafts = {"mtp_num_hidden_layers": 0}
    copied_prefixes = ("model.visual.",)

    def is_moe_layer(self, hf: HfConfig, number: int) -> bool:
        return bool(self.expert_count_keys)

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {"moe_router_pre_softmax": False}

    def projected(self, net: DeltaNet, name: str, head: int) -> list[CheckpointRows]:
        """Return queries, keys and values, consecutive in one tensor, then gates, b and a in their own."""
        values, share = net.share * net.value_width, net.share
        return [
            *sections(net, f"{name}.in_proj_qkv.weight", head),
            CheckpointRows(f"{name}.in_proj_z.weight", head * values, values),
            CheckpointRows(f"{name}.in_proj_b.weight", head * share, share),
            CheckpointRows(f"{name}.in_proj_a.weight", head * share, share),
        ]

    def engine_projections(self, net: DeltaNet, name: str) -> dict[str, list[CheckpointRows]]:
        qkv, starts = f"{name}.in_proj_qkv.weight", (0, net.keys, 2 * net.keys)
        parts = [
            CheckpointRows(qkv, start, size)
            for start, size in zip(starts, (net.keys, net.keys, net.values), strict=True)
        ]
        return {
            "in_proj_qkvz": [*parts, CheckpointRows(f"{name}.in_proj_z.weight", 0, net.values)],
            "in_proj_ba": [
                CheckpointRows(f"{name}.in_proj_{gate}.weight", 0, net.value_heads) for gate in ("b", "a")
            ],
        }


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts in every layer."""

    model_type = "qwen3_5_moe"
    aliases = ("qwen3_5_moe_text",)
    engine_class = "Qwen3_5MoeForCausalLM"
    expert_count_keys = Qwen3Next.expert_count_keys
