"""Keys of a config.json that would change the computation and that training does not implement. Pure.

They are errors before any worker starts, never ignored. Planning (mrl plan) does not ask.
"""

from __future__ import annotations

from mrl.models import rope
from mrl.models.hf_config import HfConfig, field, unsupported_values

YARN_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "original_max_position_embeddings",
}  # fmt: skip


def qwen3(hf: HfConfig) -> list[str]:
    """Of dense Qwen3 and Qwen3-MoE."""
    return [*unsupported_values(hf, {"use_sliding_window": (None, False)}), *_rope(hf, {"default"})]


def mixtral(hf: HfConfig) -> list[str]:
    allowed = {"sliding_window": (None,), "router_jitter_noise": (None, 0)}
    return [*unsupported_values(hf, allowed), *_one_expert(hf), *_rope(hf, {"default"})]


def deepseek_v3(hf: HfConfig) -> list[str]:
    """vLLM serves plain softmax scores unless the two names of the routing are there: they are asked for."""
    allowed = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "rope_interleave": (None, True),
    }
    found = [*unsupported_values(hf, allowed), *_one_expert(hf), *_rope(hf, {"default", "yarn"})]
    groups, chosen, experts = (
        hf.get("n_group") or 1,
        hf.get("topk_group") or 1,
        field(hf, "num_experts_per_tok"),
    )
    if groups != chosen and experts // chosen != 2:
        # A group counts by its two best experts; Megatron takes num_experts_per_tok // topk_group of them.
        found.append(f"num_experts_per_tok = {experts} with topk_group = {chosen} (only two experts a group)")
    return found


def _one_expert(hf: HfConfig) -> list[str]:
    return ["num_experts_per_tok = 1 (only 2 and more)"] if field(hf, "num_experts_per_tok") == 1 else []


def _rope(hf: HfConfig, kinds: set[str]) -> list[str]:
    if rope.kind(hf) not in kinds:
        return [f"rope_type = {rope.kind(hf)!r} (only {' or '.join(map(repr, sorted(kinds)))})"]
    if rope.kind(hf) == "default":
        return []
    return [f"{key} of rope_type {rope.kind(hf)!r}" for key in sorted(rope.parameters(hf).keys() - YARN_KEYS)]
