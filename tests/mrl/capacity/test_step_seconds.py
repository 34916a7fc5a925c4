"""Seconds of a step by part: against formulas done by hand, with the assumption that each rests on."""

import pytest

from mrl.capacity.estimate import Estimate, StepTime
from mrl.capacity.hardware import Hardware, load_hardware, with_mean_response
from mrl.capacity.report import capacity_report
from mrl.capacity.step_time import total
from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.files import CONFIGS

NODES = load_hardware("8x80gb")
BUSY = ("loop.prompts_per_step=65536", "data.max_prompt_tokens=128", "rollout.max_num_batched_tokens=2048")
"""A step of so many short samples that arithmetic limits decoding."""
MANY_ASSUMPTIONS = (
    ("qwen3_30b_a3b",),
    ("qwen3_30b_a3b", "training.spec=local"),
    ("qwen2_5_0_5b",),
    ("qwen3_235b_a22b", "rollout.tp=8", "training.layout.ep=16"),
    ("deepseek_v3",),
    ("deepseek_v3", "rollout.dp=8"),
    ("deepseek_v3", "rollout.max_num_seqs=2048", "rollout.max_response_tokens=512", *BUSY),
)
"""Recipes and words, of which at least one plan rests on each assumption."""


def estimate(recipe: str, *words: str, hardware: Hardware = NODES) -> Estimate:
    return Estimate(load([CONFIGS / f"{recipe}.yaml"], words), hardware)


def seconds_of(plan: Estimate, phase: str, name: str) -> float:
    return sum(part.seconds for part in plan.step_time.phases[phase] if part.name == name)


def test_all_reduces_of_tp_are_counted_per_layer() -> None:
    """Two per layer and decode step, each a latency and the bytes of one hidden state per sequence."""
    plan = estimate("qwen3_235b_a22b")
    work, made = plan.work, plan.generation
    drain = work.longest_response - work.response_tokens
    full = made.samples * work.response_tokens / made.concurrent
    latency = (full + drain) * NODES.all_reduce_seconds
    tokens = full * made.concurrent + drain
    expected = 2 * 94 * (latency + tokens * 4096 * 2 / NODES.all_reduce_bytes_per_second)
    assert seconds_of(plan, "generate", "all-reduces of tp") == pytest.approx(expected)
    assert seconds_of(estimate("qwen2_5_0_5b"), "generate", "all-reduces of tp") == 0


def test_a_draft_head_costs_a_layer_and_an_output_layer_on_the_last_stage() -> None:
    """DeepSeek-V3 in short samples: 37.6B active parameters in 61 layers and two tables of 0.93B; the
    projection has 0.1B. Only the layers are recomputed."""
    short = ("rollout.max_response_tokens=512", "data.max_prompt_tokens=128")
    plan = estimate("deepseek_v3", "training.drafts=trained", *short)
    stages, updates = plan.layout.pp, seconds_of(plan, "update", "arithmetic")
    share = ((37.6 - 2 * 0.93) / 61 + 0.103 + 0.93) / (37.6 - 0.93) * 3 / 4
    assert stages > 1
    assert seconds_of(plan, "update", "draft head") == pytest.approx(stages * share * updates, rel=0.03)
    assert not seconds_of(estimate("deepseek_v3"), "update", "draft head")
    config = load([CONFIGS / "qwen3_30b_a3b.yaml"], ["training.drafts=trained"])
    (refused,) = capacity_report(config, NODES).advice.errors
    assert "training.drafts = trained is not implemented for qwen3_moe" in refused


def test_experts_over_nodes_cost_two_ring_collectives_per_layer() -> None:
    """58 layers of experts; 32 sequences on each of 32 ranks, 28 hops inside nodes and 3 between them."""
    plan = estimate("deepseek_v3", hardware=load_hardware("8x141gb"))
    work, made = plan.work, plan.generation
    drain = work.longest_response - work.response_tokens
    full = made.samples * work.response_tokens / made.concurrent
    start = NODES.collective_seconds + 28 * NODES.node_hop_seconds + 3 * NODES.network_hop_seconds
    inside = 31 / 32 / NODES.node_bytes_per_second
    between = 3 / 32 / NODES.network_bytes_per_second  # a node's eight cards share what it receives
    received = 32 * 7168 * 2 * max(inside, between) / NODES.link_efficiency
    expected = 2 * 58 * ((full + drain) * start + (full * made.concurrent + drain) * received)
    assert made.concurrent == 32
    assert seconds_of(plan, "generate", "exchange of experts") == pytest.approx(expected)
    agreement = seconds_of(plan, "generate", "agreement of dp ranks")
    assert agreement == pytest.approx((full + drain) * NODES.dp_step_network_seconds)


def test_an_engine_in_a_node_exchanges_over_nvlink_only() -> None:
    hardware = load_hardware("8x141gb")
    slow = hardware.model_copy(update={"network_bytes_per_second": 1e6, "network_hop_seconds": 1.0})
    inside, over = (
        [
            estimate("deepseek_v3", f"rollout.dp={dp}", hardware=h).step_time.phases["generate"]
            for h in (hardware, slow)
        ]
        for dp in (8, 32)
    )
    assert inside[0] == inside[1] and over[0] != over[1]


@pytest.mark.parametrize(("ep", "near"), [(8, 8), (16, 8), (4, 4)])
def test_training_sends_each_token_to_its_experts_and_back(ep: int, near: int) -> None:
    """Eight visits per token and layer, there and back, forward and backward; experts outside the node are
    reached over the network."""
    plan = estimate(
        "qwen3_30b_a3b", f"training.layout={{tp: 2, dp: 16, ep: {ep}}}", "training.recompute='off'"
    )
    tokens, _ = plan.work.computed(shares_prefixes=True)
    sent = 8 * tokens / 32 * 2048 * 2 * 2 * 48
    inside = sent * (near - 1) / ep / NODES.node_bytes_per_second
    between = sent * (ep - near) / ep / NODES.network_bytes_per_second
    expected = (inside + between) / NODES.link_efficiency
    assert seconds_of(plan, "log_probs", "exchange of experts") == pytest.approx(expected)
    assert seconds_of(plan, "update", "exchange of experts") == pytest.approx(2 * expected)


def test_tp_gathers_and_sums_around_attention() -> None:
    alone, split = (
        estimate("qwen3_30b_a3b", f"training.layout={{tp: {tp}, dp: {8 // tp}, ep: 8}}") for tp in (1, 4)
    )
    assert seconds_of(alone, "update", "collectives of tp") == 0
    tokens, _ = split.work.computed(shares_prefixes=True)
    expected = (
        3 * 2 * 48 * tokens / 2 * 2048 * 2 * 3 / 4 / NODES.node_bytes_per_second / NODES.link_efficiency
    )
    assert seconds_of(split, "update", "collectives of tp") == pytest.approx(expected)


def test_each_assumption_lengthens_a_plan_at_its_worst() -> None:
    """An assumption that no plan rests on, or whose ends are swapped, is a mistake in its file."""
    plans = [estimate(recipe, *words) for recipe, *words in MANY_ASSUMPTIONS]
    for name in NODES.ranges.keys() - {"compile_seconds"}:
        worst, best = (NODES.model_copy(update={name: value}) for value in NODES.ranges[name])
        longer = []
        for plan in plans:
            slow, fast = (StepTime(plan, hardware).phases for hardware in (worst, best))
            for phase, seconds in plan.seconds.items():
                assert total(fast[phase]) <= seconds <= total(slow[phase]), (name, phase)
                longer.append(total(slow[phase]) > seconds > total(fast[phase]))
        assert any(longer), name


@pytest.mark.parametrize("recipe", ["qwen3_235b_a22b", "deepseek_v3", "gpt_oss_120b", "qwen2_5_0_5b"])
def test_a_plan_prints_the_assumption_that_each_part_rests_on(recipe: str) -> None:
    shown = capacity_report(load([CONFIGS / f"{recipe}.yaml"]), NODES)
    parts = [part for parts in shown.estimate.step_time.phases.values() for part in parts]
    exact = {part.name for part in parts if not part.assumptions}
    assert exact <= {"idle pipeline stages"}
    named = {name for part in parts for name in part.assumptions}
    table = shown.table().partition("\nassumption ")[2].partition("\n\n")[0].splitlines()[1:]
    assert {line.split()[0] for line in table} == named <= NODES.ranges.keys()
    assert f"caches: {NODES.compile_seconds:,.0f} s more" in shown.table()


def test_a_measured_value_replaces_an_assumption_and_its_range(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    published = (CONFIGS / "hardware" / "8x80gb.yaml").read_text()
    path.write_text(published + "moe_efficiency: 0.2\nlink_efficiency: [0.5, 0.6, 0.7]\n")
    mine = load_hardware(path)
    assert (mine.moe_efficiency, mine.link_efficiency) == (0.2, 0.6)
    assert "moe_efficiency" not in mine.ranges and mine.ranges["link_efficiency"] == (0.5, 0.7)
    assert (mine.at("worst").link_efficiency, mine.at("best").link_efficiency) == (0.5, 0.7)
    assert mine.at("worst").moe_efficiency == 0.2
    path.write_text(published + "moe_efficiency: [0.1, 0.2]\n")
    with pytest.raises(ConfigError, match="moe_efficiency: expected one value or three"):
        load_hardware(path)


def test_the_mean_response_may_be_stated() -> None:
    mean = estimate("qwen3_30b_a3b", hardware=with_mean_response(NODES, 1000, 8192)).work
    assert mean.response_tokens == pytest.approx(1000) and mean.longest_response == 8192
    for tokens in (0, 8193):
        with pytest.raises(ConfigError, match="must be above 0 and at most"):
            with_mean_response(NODES, tokens, 8192)
