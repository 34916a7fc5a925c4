"""DeepSeek-V3 (arXiv 2412.19437): latent attention with the routing of sigmoid_moe.py. Moonlight (arXiv
2502.16982) and Kimi-K2 (arXiv 2507.20534) are the same model in other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.models import rope, rows
from mrl.models.engine_rows import EngineRows
from mrl.models.hf_config import HfConfig, field
from mrl.models.sigmoid_moe import SigmoidMoe
from mrl.models.tensors import LocalTensor, ParameterRows, Spec, Split, whole_tensor


class DeepseekV3(SigmoidMoe):
    """DeepSeek-V3, V3.1, Moonlight and Kimi-K2.

    vLLM serves plain softmax scores unless config.json has the two names of the routing, so they are
    required.
    """

    model_type = "deepseek_v3"
    aliases = ("kimi_k2",)
    implemented = {
        **SigmoidMoe.implemented,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (None, True),
    }
    harmless = ("head_dim", "qk_head_dim")
    rope_kinds = ("default", "yarn")

    def rotary(self, hf: HfConfig) -> rope.Rope:
        """Return the rotary embedding, over the part of queries and keys that has one."""
        return rope.rope(hf, width=field(hf, "qk_rope_head_dim"))

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        """Return the arguments of Megatron's MLATransformerConfig that describe the model, not the layout."""
        return super().transformer_fields(hf) | _attention_fields(hf)

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[ParameterRows]:
        self.qkv_bias(hf)  # refuses them
        hidden, heads = field(hf, "hidden_size"), field(hf, "num_attention_heads")
        plain, rotary, value = (field(hf, k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        rank, attention = field(hf, "kv_lora_rank"), f"{layer}.self_attn"
        down: Split = "none" if spec.whole_down_projections else "tp"

        def row(
            name: str, tensor: str, size: int, columns: int, split: Split = "tp", dim: int = 0
        ) -> ParameterRows:
            weight = whole_tensor(f"{attention}.{tensor}.weight", size)
            return ParameterRows(f"self_attention.{name}.weight", weight, columns, split, dim)

        def latent_norm(name: str, next_linear: str, size: int) -> ParameterRows:
            folded = f"self_attention.{next_linear}.layer_norm_weight"
            parameter = folded if spec.fold_norms else f"self_attention.{name.replace('_a_', '_')}.weight"
            return ParameterRows(parameter, whole_tensor(f"{attention}.{name}.weight", size), None)

        result = [rows.input_norm(hf, layer, folded=False)]  # latent attention never folds its input norm
        if q_rank := hf.get("q_lora_rank"):
            result.append(row("linear_q_down_proj", "q_a_proj", q_rank, hidden, down))
            result.append(latent_norm("q_a_layernorm", "linear_q_up_proj", q_rank))
            result.append(row("linear_q_up_proj", "q_b_proj", heads * (plain + rotary), q_rank))
        else:
            result.append(row("linear_q_proj", "q_proj", heads * (plain + rotary), hidden))
        result.append(row("linear_kv_down_proj", "kv_a_proj_with_mqa", rank + rotary, hidden, down))
        result.append(latent_norm("kv_a_layernorm", "linear_kv_up_proj", rank))
        result.append(row("linear_kv_up_proj", "kv_b_proj", heads * (plain + value), rank))
        result.append(row("linear_proj", "o_proj", hidden, heads * value, dim=1))
        return result

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the attention's tensors; compressed queries share a down-projection, whole on every rank."""
        self.qkv_bias(hf)  # refuses them
        hidden, heads, name = field(hf, "hidden_size"), engine.heads(hf), f"{layer}.self_attn"
        plain, rotary, value = (field(hf, k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        rank, down = field(hf, "kv_lora_rank"), f"{name}.kv_a_proj_with_mqa.weight"

        def by_head(tensor: str, width: int, columns: int) -> LocalTensor:
            return engine.stacked(tensor, [(tensor, heads * width, heads)], columns)

        if q_rank := hf.get("q_lora_rank"):
            parts = [(f"{name}.q_a_proj.weight", q_rank, 1), (down, rank + rotary, 1)]
            yield engine.stacked(f"{name}.fused_qkv_a_proj.weight", parts, hidden)
            yield engine.whole(f"{name}.q_a_layernorm.weight", q_rank)
            yield by_head(f"{name}.q_b_proj.weight", plain + rotary, q_rank)
        else:
            yield engine.whole(down, rank + rotary, hidden)
            yield by_head(f"{name}.q_proj.weight", plain + rotary, hidden)
        yield engine.whole(f"{name}.kv_a_layernorm.weight", rank)
        yield by_head(f"{name}.kv_b_proj.weight", plain + value, rank)
        yield engine.split_columns(f"{name}.o_proj.weight", hidden, heads * value)


class KimiK25(DeepseekV3):
    """Kimi-K2.5 and K2.6: Kimi-K2 in a multimodal folder. Only text is trained and served; exports copy the
    image model unchanged."""

    model_type = "kimi_k25"
    aliases = ()
    engine_class = "DeepseekV3ForCausalLM"
    harmless = (
        *DeepseekV3.harmless,
        "vision_config", "media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk",
        "ignore_index", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
        "projection_hidden_size", "projection_layer_norm_eps",
    )  # fmt: skip
    copied_prefixes = ("vision_tower.", "mm_projector.")


def _attention_fields(hf: HfConfig) -> dict[str, Any]:
    yarn = rope.rope_settings(hf) if rope.kind(hf) == "yarn" else {}
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": field(hf, "num_attention_heads"),
        "kv_channels": field(hf, "v_head_dim"),
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": field(hf, "kv_lora_rank"),
        "qk_head_dim": field(hf, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": field(hf, "qk_rope_head_dim"),
        "v_head_dim": field(hf, "v_head_dim"),
        # Megatron uses these only for the softmax scale; kernels/rotary.py computes the angles.
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim") or 0.0,
    }
