"""OLMoE (arXiv 2409.02060): norms over all heads of queries and of keys, experts in every layer, softmax
routing without normalised probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.models.engine_rows import EngineRows
from mrl.models.families.projection_normed import ProjectionNormed, normed_heads
from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.tensors import LocalTensor


class Olmoe(ProjectionNormed):
    """OLMoE. vLLM 0.32 serves it with these `norm_topk_prob`, `rms_norm_eps` and `clip_qkv`, whatever
    config.json says (model_executor/models/olmoe.py), so no others are trained."""

    model_type = "olmoe"
    expert_count_keys = ("num_experts", "num_local_experts")
    expert_width_key = "intermediate_size"
    router = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    implemented = {"norm_topk_prob": (None, False), "rms_norm_eps": (1e-5,), "clip_qkv": (None,)}

    def unsupported(self, hf: HfConfig) -> list[str]:
        problems, width = super().unsupported(hf), head_dim(hf)
        if (heads := field(hf, "num_attention_heads")) * width != (hidden := field(hf, "hidden_size")):
            problems.append(
                f"head_dim = {width} (supported: hidden_size / num_attention_heads = {hidden} / {heads})"
            )
        return problems

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the attention's tensors; every rank has the whole norms."""
        yield from super().engine_attention(hf, layer, engine)
        for part, heads, width in normed_heads(hf):
            yield engine.whole(f"{layer}.self_attn.{part}_norm.weight", heads * width)
