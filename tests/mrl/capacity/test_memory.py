"""Memory formulas: cases by hand, Megatron's padding, pipeline schedules, the events of a step."""

import dataclasses
import pickle

import numpy as np
import pytest

from mrl.capacity.activations import Counter, activations, in_flight
from mrl.capacity.advice import advise
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.capacity.host_memory import RESULT_BYTES, TOKEN_BYTES, rollout_buffer_bytes
from mrl.capacity.memory_timeline import SlotMemory, timeline
from mrl.capacity.model_facts import find_facts
from mrl.capacity.rollout_memory import engine_memory
from mrl.capacity.training_memory import buffer_elements, stage_memory
from mrl.config.load import load
from mrl.config.sections.model import ModelSection
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.training import PIECE_BYTES, TrainingSection
from mrl.files import CONFIGS
from mrl.models.layout import Layout
from tests.tiny_models import random_batch

GB = 1e9


def training(**layout: int) -> TrainingSection:
    return TrainingSection.model_validate({"layout": layout, "dtype": "bfloat16"})


def test_qwen3_235b_on_64_gpus_is_the_designs_example() -> None:
    """80 GB fit 59 GB rollout and 7.6 GB trainer weights, not 15 GB gradients and 44 GB optimizer state."""
    facts = find_facts(ModelSection(path="weights/Qwen3-235B-A22B"))
    stages = stage_memory(facts, training(tp=4, pp=8, dp=2, ep=8))
    worst = max(stages, key=lambda stage: stage.weights)
    engine = engine_memory(
        facts, RolloutSection(dtype="bfloat16", tp=8, expert_parallel=True), load_hardware("8x80gb")
    )
    assert engine.weights == pytest.approx(59.0 * GB, rel=0.01)
    assert worst.weights == pytest.approx(7.6 * GB, rel=0.06)
    assert worst.gradients == 2 * worst.weights
    assert worst.optimizer == pytest.approx(44 * GB, rel=0.06)


def test_a_trained_draft_head_is_on_the_last_stage() -> None:
    """DeepSeek-V3's model card: its draft head has 11.5B parameters of its own."""
    facts, frozen = find_facts(ModelSection(path="weights/DeepSeek-V3")), training(pp=2)
    trained = frozen.model_copy(update={"drafts": "trained"})
    (first, last), (same, larger) = (stage_memory(facts, section) for section in (frozen, trained))
    assert same == first and larger.parameters - last.parameters == pytest.approx(11.5e9, rel=0.01)
    assert larger.total - last.total == pytest.approx(18 * 11.5e9, rel=0.01)
    assert stage_memory(facts, trained, value_head=True) == stage_memory(facts, frozen, value_head=True)
    sizes = [
        activations(facts, section, Layout(pp=2), stage=1, tokens=4096, num_microbatches=4)
        for section in (frozen, trained)
    ]
    assert sizes[0].kept == sizes[1].kept and sizes[1].working - sizes[0].working > 129_280 * 7168 * 2


def test_dp_ranks_share_experts_and_copy_the_rest() -> None:
    """DeepSeek-V3: each rank of tp has the whole latent cache; with dp, only that of its own requests."""
    facts, hardware = find_facts(ModelSection(path="weights/DeepSeek-V3")), load_hardware("8x141gb")
    alike = {
        "expert_parallel": True,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.88,
    }
    tp, dp = (
        engine_memory(
            facts, RolloutSection.model_validate({axis: 32, "dtype": "bfloat16", **alike}), hardware
        )
        for axis in ("tp", "dp")
    )
    remaining = facts.parameters_total - facts.parameters_routed
    assert dp.weights == pytest.approx(2 * (facts.parameters_routed / 32 + remaining), rel=0.01)
    assert dp.weights > tp.weights and dp.derived == 32 * tp.derived
    assert tp.kv_bytes_per_token == dp.kv_bytes_per_token == 61 * 576 * 2
    assert 32 * dp.kv_cache_tokens > 10 * tp.kv_cache_tokens


@pytest.mark.parametrize(("kind", "share"), [("auto", 1), ("fp8", 2), ("fp8_e4m3", 2)])
def test_a_cache_in_float8_has_room_for_twice_the_tokens(kind: str, share: int) -> None:
    recipe, hardware = [CONFIGS / "qwen3_235b_a22b.yaml"], load_hardware("8x80gb")
    plain = Estimate(load(recipe), hardware)
    cached = Estimate(load(recipe, [f"rollout.engine_args={{kv_cache_dtype: {kind}}}"]), hardware)
    assert cached.engine.kv_cache == plain.engine.kv_cache
    assert cached.engine.kv_bytes_per_token * share == plain.engine.kv_bytes_per_token
    assert cached.seconds["generate"] <= plain.seconds["generate"] and (share == 1) == (
        cached.seconds == plain.seconds
    )


def test_bfloat16_moments_halve_the_optimizer() -> None:
    facts, section = find_facts(ModelSection(path="weights/Qwen3-30B-A3B")), training(dp=8, ep=8)
    optimizer = section.optimizer.model_copy(update={"moments_dtype": "bfloat16"})
    (wide,), (half,) = (
        stage_memory(facts, s) for s in (section, section.model_copy(update={"optimizer": optimizer}))
    )
    assert half.optimizer * 2 == wide.optimizer and half.weights == wide.weights


def test_state_in_the_hosts_memory_is_not_on_the_device() -> None:
    """Half or all of the 44 GB of optimizer state, and the piece that is loaded at a time."""
    hardware, words = load_hardware("8x80gb"), ["training.optimizer.moments_dtype=float32"]
    whole, half, none = (
        Estimate(
            load(
                [CONFIGS / "qwen3_30b_a3b.yaml"], [*words, f"training.optimizer.offload_fraction={fraction}"]
            ),
            hardware,
        )
        for fraction in (0, 0.5, 1)
    )
    piece = none.slot.optimizer  # the state of the embedding, where a rank has a run of it
    assert PIECE_BYTES < piece < 2 * PIECE_BYTES
    assert whole.resting_bytes == 0 and whole.slot.optimizer > 20 * GB
    assert half.resting_bytes == whole.slot.optimizer // 2
    assert half.slot.optimizer == pytest.approx(whole.slot.optimizer / 2 + piece, abs=2)
    assert none.resting_bytes == whole.slot.optimizer
    moments = [{event.name: event.parts["off-loaded"] for event in e.host} for e in (whole, none)]
    assert moments[1]["engines serve"] == moments[0]["engines serve"] + 8 * piece, (
        "beside the piece the host has the same bytes"
    )
    moved = 2 * whole.slot.optimizer / hardware.host_bytes_per_second / hardware.link_efficiency
    times = [e.seconds["update"] for e in (whole, half, none)]
    assert times[2] - times[0] == pytest.approx(none.work.updates * moved, rel=1e-6)
    assert times[1] - times[0] == pytest.approx(none.work.updates * moved / 2, rel=1e-6)
    placed = [e.seconds["offload"] for e in (whole, none)]
    assert placed[0] - placed[1] == pytest.approx(moved * (1 - piece / whole.slot.optimizer), rel=1e-6)


def test_parameters_of_all_ranks_are_the_model_and_its_replicas() -> None:
    facts = find_facts(ModelSection(path="weights/Qwen3-30B-A3B"))
    section = training(tp=2, pp=2, dp=2, ep=4)
    held = sum(stage.parameters for stage in stage_memory(facts, section))
    layers, tp = facts.num_layers, 2
    replicated = layers * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    routed = facts.parameters_routed
    remaining = facts.parameters_total - routed - replicated
    assert held == routed // 4 + remaining // tp + replicated


def test_buffers_are_padded_like_megatrons() -> None:
    assert buffer_elements([1], 1) == 128
    assert buffer_elements([65, 64], 1) == 256  # the second starts at 128, ends at 192
    assert buffer_elements([128, 128], 3) == 384  # a multiple of 3 x 128
    assert buffer_elements([], 4) == 0


@pytest.mark.parametrize(
    ("layout", "stage", "microbatches", "expected"),
    [
        (Layout(), 0, 8, 1),
        (Layout(pp=4), 0, 8, 4),
        (Layout(pp=4), 3, 8, 1),
        (Layout(pp=4), 0, 2, 2),
        # Interleaved: (4 - 0 - 1) x 2 + (2 - 1) x 4 + 1 = 11 chunks of half a stage.
        (Layout(pp=4, vpp=2), 0, 8, 5.5),
        (Layout(pp=4, vpp=2), 3, 8, 2.5),
    ],
)
def test_microbatches_in_flight(layout: Layout, stage: int, microbatches: int, expected: float) -> None:
    assert in_flight(layout, stage, microbatches) == expected


def test_recompute_saves_activations_in_order() -> None:
    facts = find_facts(ModelSection(path="weights/Qwen3-30B-A3B"))
    kept = {}
    for recompute in ("off", "selective", "full"):
        section = training(tp=4, dp=2, ep=8).model_copy(update={"recompute": recompute})
        kept[recompute] = activations(
            facts, section, section.layout.sizes(), stage=0, tokens=8192, num_microbatches=4
        ).kept
    assert kept["full"] < kept["selective"] < kept["off"]
    # One hidden state per layer, split over tp; the final norm's input and deviations; one gathered state.
    hidden = 8192 // 4 * 2048 * 2
    assert kept["full"] == 48 * hidden + hidden + 8192 // 4 * 4 + 4 * hidden


def test_fused_layers_keep_half_of_an_experts_inner_width() -> None:
    """Both halves and the product replace those, the activation and its input, and a second product."""
    facts, kept = find_facts(ModelSection(path="weights/Qwen3-30B-A3B")), {}
    for spec in ("local", "auto"):
        section = training(tp=4, dp=2, ep=8).model_copy(update={"spec": spec})
        kept[spec] = activations(
            facts, section, section.layout.sizes(), stage=0, tokens=8192, num_microbatches=4
        ).kept
    visits = 8192 // 4 * 8  # of eight experts a token, the sequence split over tp
    assert kept["local"] - kept["auto"] == 48 * visits * 3 * 768 * 2


def test_layers_without_fusions_take_longer() -> None:
    words, hardware = ["training.spec=local"], load_hardware("8x80gb")
    fused, local = (
        Estimate(load([CONFIGS / "qwen3_30b_a3b.yaml"], changes), hardware).step_time.phases
        for changes in ([], words)
    )
    arithmetic, *others = fused["update"]
    assert local["update"][0].seconds == pytest.approx(arithmetic.seconds / hardware.local_efficiency)
    assert local["update"][1:] == others and local["generate"] == fused["generate"]


def test_what_is_computed_again_is_not_kept() -> None:
    facts, kept = find_facts(ModelSection(path="weights/DeepSeek-V3")), {}
    for recompute in ("off", "selective", "full"):
        section = TrainingSection.model_validate(
            {"layout": {"tp": 8, "pp": 4, "ep": 8}, "dtype": "bfloat16", "recompute": recompute}
        )
        kept[recompute] = activations(
            facts, section, section.layout.sizes(), stage=0, tokens=8192, num_microbatches=1
        ).kept
    # Three dense layers and thirteen of experts, tokens over tp, and one kernel for each SwiGLU.
    dense, visits = 3 * 8192 * 3 * 18432 // 8, 13 * 8192 // 8 * 8
    experts = visits * (7168 + 3 * 2048) + 13 * 8192 * 3 * 2048 // 8
    router = 13 * 8192 // 8 * (9 * 256 + 36 * 8)
    count = Counter(facts, section.layout.sizes(), 2, 8192, fused=True, fused_swiglu=True)
    cores = 16 * (count.layer(0)["core"] - count.layer(0)["core_inputs"])
    assert cores > 0 and kept["off"] - kept["selective"] == (dense + experts) * 2 + router + cores
    assert kept["full"] == 16 * 8192 // 8 * 7168 * 2


def test_context_parallel_ranks_share_the_activations() -> None:
    facts = find_facts(ModelSection(path="weights/Qwen3-30B-A3B"))
    kept = {}
    for cp, fused in ((1, True), (2, True), (1, False), (2, False)):
        section = training(tp=4, cp=cp, dp=2 // cp, ep=8)
        kept[cp, fused] = activations(
            facts, section, section.layout.sizes(), stage=0, tokens=8192, num_microbatches=4, fused=fused
        ).kept
    assert kept[2, True] * 2 == kept[1, True]
    # Our own attention keeps the keys and values of all tokens: 4 heads of 128 in each of 48 layers, over tp.
    gathered = 48 * 8192 // 4 * 2 * 4 * 128 * 2
    assert kept[2, False] * 2 == kept[1, False] + gathered


def test_key_value_cache_counts_heads_and_latent_rows() -> None:
    hardware = load_hardware("8x80gb")

    def row(name: str, tp: int) -> int:
        facts = find_facts(ModelSection(path=f"weights/{name}"))
        return engine_memory(facts, RolloutSection(dtype="bfloat16", tp=tp), hardware).kv_bytes_per_token

    assert row("Qwen3-30B-A3B", 1) == 48 * 2 * 4 * 128 * 2
    assert row("Qwen3-30B-A3B", 8) == 48 * 2 * 1 * 128 * 2
    # The latent row is on every rank: 512 + 64 elements a layer.
    assert row("DeepSeek-V3", 16) == 61 * 576 * 2


def test_the_cache_gets_what_the_fraction_leaves() -> None:
    facts, hardware = find_facts(ModelSection(path="weights/Qwen3-30B-A3B")), load_hardware("8x80gb")
    rollout = RolloutSection(dtype="bfloat16", tp=2, gpu_memory_utilization=0.8)
    engine = engine_memory(facts, rollout, hardware)
    assert engine.kv_cache + engine.working + engine.weights == int(0.8 * hardware.memory_bytes)
    few_tokens = rollout.model_copy(update={"max_num_batched_tokens": 2048})
    narrow = engine_memory(facts, few_tokens, hardware)
    assert narrow.kv_cache + narrow.working == engine.kv_cache + engine.working
    assert narrow.working < engine.working


SLOT = SlotMemory(
    weights=1,
    gradients=2,
    optimizer=4,
    critic=2048,
    activations=8,
    working=16,
    teacher_targets=0,
    log_prob_working=32,
    engine_weights=64,
    engine_working=128,
    kv_cache=256,
    buckets=512,
    staging=1024,
)


def test_events_hold_exactly_their_parts() -> None:
    """Each part is a power of two, so that a total shows which parts it contains."""
    hardware = load_hardware("8x80gb").model_copy(
        update={"trainer_process_bytes": 4096, "engine_process_bytes": 8192}
    )
    always = 4096 + 8192 + 512
    totals = {event.name: event.total for event in timeline(SLOT, hardware, sleeps=True, offloads=True)}
    assert totals == {
        "generate": always + 64 + 256 + 128,
        "engine sleep": always,
        "trainer onload": always + 1 + 2 + 4 + 2048,
        "log-probs": always + 1 + 2 + 4 + 2048 + 32,
        "update": always + 1 + 2 + 4 + 2048 + 8 + 16,
        "save": always + 1 + 2 + 4 + 2048,
        "optimizer offload": always + 1,
        "rollout weights wake": always + 1 + 64,
        "weight sync": always + 1 + 64 + 1024,
        "trainer weights offload": always + 64,
    }


def test_a_trainer_that_never_leaves_is_in_every_event() -> None:
    for event in timeline(SLOT, load_hardware("8x80gb"), sleeps=True, offloads=False):
        held = [event.parts[part] for part in ("trainer weights", "gradients", "optimizer", "critic")]
        assert held == [1, 2, 4, 2048]


def test_a_critic_is_the_backbone_with_one_number_a_token() -> None:
    facts = find_facts(ModelSection(path="weights/Qwen3-30B-A3B"))
    section = training(tp=2, pp=2, dp=2, ep=4)
    policy, critic = (stage_memory(facts, section, value_head=head) for head in (False, True))
    assert critic[0] == policy[0]
    table = facts.vocab * facts.hidden // 2
    assert policy[1].parameters - critic[1].parameters == table - facts.hidden
    assert policy[1].gradients - critic[1].gradients == pytest.approx(4 * table, rel=1e-4)


def test_ppo_counts_its_critic_on_every_rank() -> None:
    words = ["training.layout.dp=4", "algorithm.estimator.name=gae", "critic.optimizer.moments_dtype="]
    plain, ppo, wide = (
        Estimate(load([CONFIGS / "qwen3_30b_a3b.yaml"], changes), load_hardware("8x141gb"))
        for changes in (words[:1], [*words[:2], words[2] + "bfloat16"], [*words[:2], words[2] + "float32"])
    )
    for before, after in zip(plain.stages, ppo.stages, strict=True):
        assert before.critic.total == 0
        assert 0.9 * after.policy.total < after.critic.total < after.policy.total
        assert after.total == before.total + after.critic.total
    of_critic = [report.stages[0].critic.total for report in (ppo, wide)]
    assert of_critic[1] - of_critic[0] > 10 * GB, "its moments are of its own section's type"
    events_with_critic = {event.name for event in ppo.timeline if "critic" in event.parts}
    assert events_with_critic == {"trainer onload", "log-probs", "update", "save"}
    assert ppo.seconds["update"] == pytest.approx(2 * plain.seconds["update"])


def test_an_engine_that_never_sleeps_is_in_every_event() -> None:
    hardware = load_hardware("laptop")
    for event in timeline(SLOT, hardware, sleeps=False, offloads=False):
        assert event.parts["rollout weights"] == 64
        assert event.parts["KV cache"] == 256


def test_what_a_step_moves_through_the_object_store_is_counted_by_its_arrays() -> None:
    """A batch with all of PPO with a custom loss; then Qwen3-235B's routes: 94 layers, 8 numbers each."""
    names = (
        "rollout_logprobs", "age", "old_logprobs", "ref_logprobs", "advantages", "returns",
        "values", "scores",
    )  # fmt: skip
    batch = random_batch(64, longest=2000)
    arrays = {name: np.zeros(batch.num_tokens, np.float32) for name in names}
    size = len(pickle.dumps(dataclasses.replace(batch, arrays=arrays), protocol=5)) / batch.num_tokens
    assert 0.95 * TOKEN_BYTES < size < 1.05 * TOKEN_BYTES
    hardware, words = load_hardware("8x80gb"), ["routing.replay=engine"]
    plain, routed, ahead = (
        Estimate(load([CONFIGS / "qwen3_235b_a22b.yaml"], changes), hardware)
        for changes in ([], words, [*words, "loop.schedule=stream", "stream.max_staleness=3"])
    )
    tokens, nodes = plain.work.tokens, plain.config.num_slots // 8
    assert plain.object_store_bytes == pytest.approx(tokens * (TOKEN_BYTES + RESULT_BYTES), abs=2)
    layout = plain.layout
    places = min(1.0, 8 / (layout.tp * layout.cp * layout.dp))
    routes = 94 * 8 * tokens
    assert routed.object_store_bytes - plain.object_store_bytes == pytest.approx(
        routes * (1 / nodes + places), rel=1e-6
    )
    assert ahead.object_store_bytes - routed.object_store_bytes == pytest.approx(3 * routes / nodes, rel=1e-6)


def test_groups_that_wait_for_their_step_lie_in_the_drivers_memory() -> None:
    recipe, hardware = CONFIGS / "qwen3_30b_a3b.yaml", load_hardware("8x80gb")
    ahead = ["loop.schedule=stream", "stream.max_staleness=3"]

    def moments(*words: str) -> list[dict[str, int]]:
        words = (*words, "loop.checkpoint.async_save=true")
        return [moment.parts for moment in Estimate(load([recipe], words), hardware).host]

    plain, kept = moments(), moments(*ahead)
    groups, longest = 4 * 128, 16 * (2048 * 4 + 8192 * 20)
    assert len(plain) == 2 and kept == [parts | {"pool": groups * longest} for parts in plain]
    assert rollout_buffer_bytes(load([recipe], ahead)) == groups * longest
    small = hardware.model_copy(update={"host_memory_bytes": sum(kept[0].values()) - 1})
    errors = advise(Estimate(load([recipe], ahead), small)).errors
    assert any("'engines serve'" in line and "pool 1.4 GB" in line for line in errors), errors


def test_a_teacher_needs_no_copy_if_adapters_keep_it() -> None:
    recipe, hardware = CONFIGS / "qwen3_30b_a3b.yaml", load_hardware("8x80gb")

    def kept(teacher: str, *words: str) -> int:
        words = (*words, f"algorithm.distillation.teachers={{default: {teacher}}}")
        return Estimate(load([recipe], words), hardware).host[0].parts.get("teachers", 0)

    start = load([recipe], []).model.path
    adapters = "training.lora={rank: 8, targets: [attention]}"
    assert kept(start, adapters) == 0
    assert kept("/other", adapters) == kept(start) == kept("/other") > 0
