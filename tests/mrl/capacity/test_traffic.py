"""Bytes of one sync: the formulas against the resharding planner's own count, slot by slot."""

import pytest

from mrl.capacity.traffic import Traffic, planned_traffic, traffic
from mrl.config.sections.rollout import RolloutSection
from mrl.models.facts import ModelSize
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.rollout.quantised import require_whole_blocks

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
LAYOUTS = [
    (Layout(), 1, False),
    (Layout(dp=4, ep=4), 2, True),
    (Layout(tp=2, dp=2, ep=4), 4, False),
    (Layout(tp=2, pp=2, dp=2, ep=4), 4, True),
    (Layout(tp=4, pp=4, dp=2, ep=8), 8, True),
    (Layout(tp=2, pp=2, dp=4, ep=4, vpp=2), 8, False),
    (Layout(tp=2, dp=4, ep=2, etp=2), 2, True),
    (Layout(tp=2, dp=4, ep=2, etp=2), 4, False),
    (Layout(tp=4, pp=2, dp=1, ep=4), 8, True),
]


@pytest.mark.parametrize("hf", [QWEN, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("layout", "tp", "experts_whole"), LAYOUTS)
def test_bytes_are_the_planners(hf: dict, layout: Layout, tp: int, experts_whole: bool) -> None:
    facts = ModelSize(hf, "test")
    rollout = RolloutSection(dtype="bfloat16", tp=tp, expert_parallel=experts_whole)
    check(facts, rollout, layout)


@pytest.mark.parametrize("hf", [QWEN, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("layout", "dp", "tp"),
    [
        (Layout(tp=2, dp=2, ep=4), 4, 1),
        (Layout(tp=2, pp=2, dp=2, ep=4), 2, 2),
        (Layout(tp=4, pp=2, dp=1, ep=4), 8, 1),
        (Layout(tp=2, dp=4, ep=2, etp=2), 2, 4),
    ],
)
def test_bytes_of_engines_with_dp_ranks_are_the_planners(hf: dict, layout: Layout, dp: int, tp: int) -> None:
    facts, rollout = (
        ModelSize(hf, "test"),
        RolloutSection(dtype="bfloat16", dp=dp, tp=tp, expert_parallel=True),
    )
    result = check(facts, rollout, layout)
    engine = engine_manifests.engine_rank_manifests(hf, Layout(tp=tp, dp=dp, ep=dp * tp), dtype=rollout.dtype)
    need = [manifest.num_bytes for manifest in engine]
    assert result.need == need * (len(result.need) // len(need))


@pytest.mark.parametrize("read_buckets", [False, True])
def test_pools_load_their_links_alike(read_buckets: bool) -> None:
    """Four trainer ranks with all weights and eight engine ranks that need all of them, on two nodes."""
    hf = QWEN | WIDE | {"hidden_size": 1024}
    facts, rollout = ModelSize(hf, "test"), RolloutSection(dtype="bfloat16", tp=1)
    moved = traffic(facts, rollout, Layout(dp=4), gpus_per_node=4, own_slots=8, read_buckets=read_buckets)
    weights = moved.need[4]
    assert moved.need[4:] == [weights] * 8 and sum(moved.local) == 0
    copies = 2 if read_buckets else 8
    assert sum(moved.network_in) == sum(moved.network_out) == copies * weights
    assert sum(moved.node_in) == sum(moved.node_out) == (8 - copies) * weights
    assert max(moved.network_out) < 1.01 * copies * weights / 4
    assert max(moved.network_in) < 1.01 * copies * weights / 8


def check(facts: ModelSize, rollout: RolloutSection, layout: Layout) -> Traffic:
    closed = traffic(facts, rollout, layout, gpus_per_node=4)
    planned = planned_traffic(facts, rollout, layout, gpus_per_node=4)
    assert closed.need == planned.need
    assert closed.local == planned.local
    assert closed.node_in == planned.node_in
    assert closed.network_in == planned.network_in
    assert closed.off_rail == planned.off_rail
    # The planner chooses among equally near senders: totals agree, single senders may differ.
    assert sum(closed.node_out) == sum(planned.node_out) == sum(closed.node_in)
    assert sum(closed.network_out) == sum(planned.network_out) == sum(closed.network_in)
    return closed


WIDE = {
    "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Widths that every layout here cuts at whole blocks of 128."""


@pytest.mark.parametrize(("layout", "tp", "experts_whole"), LAYOUTS)
def test_bytes_of_quantised_engines_are_the_planners(layout: Layout, tp: int, experts_whole: bool) -> None:
    facts = ModelSize(QWEN | WIDE, "test")
    rollout = RolloutSection(dtype="bfloat16", tp=tp, expert_parallel=experts_whole, quantization="fp8_block")
    closed = traffic(facts, rollout, layout, gpus_per_node=4)
    planned = planned_traffic(facts, rollout, layout, gpus_per_node=4)
    assert (closed.need, closed.local) == (planned.need, planned.local)
    assert (closed.node_in, closed.network_in) == (planned.node_in, planned.network_in)
    wide = traffic(
        facts, RolloutSection(dtype="bfloat16", tp=tp, expert_parallel=experts_whole), layout, gpus_per_node=4
    )
    assert sum(closed.need) < 0.56 * sum(wide.need)
    require_whole_blocks(facts.hf, rollout)


def test_cut_query_groups_ask_the_planner() -> None:
    facts = ModelSize(QWEN | {"num_key_value_heads": 2}, "test")
    layout, rollout = Layout(tp=4, dp=1, ep=4), RolloutSection(dtype="bfloat16", tp=2)
    assert traffic(facts, rollout, layout, gpus_per_node=4) == planned_traffic(
        facts, rollout, layout, gpus_per_node=4
    )


def test_a_known_case_by_hand() -> None:
    """Two slots, EP2, two engines of one rank: each lacks the other half of the experts and nothing else."""
    facts = ModelSize(QWEN, "test")
    moved = traffic(facts, RolloutSection(dtype="bfloat16", tp=1), Layout(dp=2, ep=2), gpus_per_node=2)
    experts = facts.parameters_routed * 2
    assert moved.need == [facts.parameters_total * 2] * 2
    assert moved.node_in == [experts // 2] * 2
    assert moved.network_in == [0, 0]
