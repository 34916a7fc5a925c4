"""Mixtral (arXiv 2401.04088): grouped-query attention, experts in every layer, softmax routing."""

from __future__ import annotations

from mrl.models.family import Family

PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


class Mixtral(Family):
    """Mixtral."""

    model_type = "mixtral"
    moe_module = "block_sparse_moe"
    expert_count_keys = ("num_local_experts",)
    expert_width_key = "intermediate_size"
    projections = PROJECTIONS
    fewest_experts_per_token = 2
    implemented = {"sliding_window": (None,), "router_jitter_noise": (None, 0)}
