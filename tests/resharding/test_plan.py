"""Planning: bounds, boundaries, refusals, digests, and the sizes of real models."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import LocalTensor, TensorSlice
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.schedule import SlotTraffic
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.copies import DTYPES
from tests.resharding.simulate import execute
from tests.resharding.worlds import random_world

TINY = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 8,
    "moe_intermediate_size": 8, "intermediate_size": 16,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "moe_intermediate_size": 1536, "intermediate_size": 12288,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip


def matrix(
    name: str, tensor: str, start: int, rows: int, columns: int, dtype: str = "bfloat16"
) -> LocalTensor:
    return LocalTensor(
        name, 0, (rows, columns), dtype, (TensorSlice(tensor, (start, 0), (rows, columns), (0, 0)),)
    )


def two_ranks(rows: int = 8, columns: int = 4, *, source_dtype: str = "bfloat16", dtype: str = "bfloat16"):
    """Return two trainer ranks with half the rows each and two engine ranks that need all of them."""
    half = rows // 2
    held = [RankManifest.of(r, [matrix("p", "t", r * half, half, columns, source_dtype)]) for r in range(2)]
    needed = [RankManifest.of(r, [matrix("m.w", "t", 0, rows, columns, dtype)]) for r in range(2)]
    return held, needed


def test_worked_example():
    held, needed = two_ranks()
    plan = build_plan(held, needed, Topology.shared(2))
    summary = plan.summary()
    assert summary["bytes_needed"] == 2 * 8 * 4 * 2
    assert summary["bytes_local"] == summary["bytes_intra_node"] == 8 * 4 * 2
    assert summary["lower_bound_cross_slot_bytes"] == 8 * 4 * 2 and summary["bytes_inter_node"] == 0
    part = plan.part(0)
    window = part.windows[0]
    assert window.local.tolist() == [(0, 0, 16, 0, 0, 16, 1, 16, 2, 0, 0)]
    assert window.unpack.tolist() == [(-1, 0, 16, 0, 16, 16, 1, 16, 2, 0, 0)]
    assert (
        [(m.peer, m.num_bytes) for m in window.sends]
        == [(m.peer, m.num_bytes) for m in window.receives]
        == [(1, 32)]
    )
    assert window.opens == window.closes == (0,) and part.modules == ("m",)


@pytest.mark.parametrize("bucket", [64, 63, 65, 48, 16, 1 << 20])
def test_a_tensor_equal_to_larger_and_smaller_than_a_bucket(bucket):
    held, needed = two_ranks(16, 4)
    plan = build_plan(held, needed, Topology.shared(2), PlanOptions(bucket_bytes=bucket))
    values = torch.arange(64, dtype=torch.bfloat16).view(2, 8, 4)
    for result in execute(plan, [[half] for half in values]):
        assert torch.equal(result["m.w"], values.view(16, 4))
    for slot in range(2):
        assert all(window.bucket_bytes <= bucket for window in plan.part(slot).windows)
    assert len(plan.windows) == (1 if bucket >= 64 else -(-64 // (bucket // 16 * 16)))


def test_a_bucket_too_small_for_any_cut_is_refused():
    held, needed = two_ranks()
    with pytest.raises(ConfigError, match="t cannot be cut to fit a bucket of 8 bytes"):
        build_plan(held, needed, Topology.shared(2), PlanOptions(bucket_bytes=8))


def test_rank_with_nothing_empty_tensor_and_odd_sizes():
    odd = LocalTensor("v", 0, (7,), "uint8", (TensorSlice("odd", (0,), (7,), (0,)),))
    wide = LocalTensor("x", 0, (3,), "float32", (TensorSlice("wide", (0,), (3,), (0,)),))
    held = [RankManifest.of(0, [odd, wide]), RankManifest.of(1, [])]
    names = [dataclasses.replace(odd, name="m.v"), dataclasses.replace(wide, name="m.x")]
    empty = LocalTensor("m.e", 0, (0, 4), "float32", ())
    needed = [RankManifest.of(0, []), RankManifest.of(1, [*names, empty])]
    plan = build_plan(held, needed, Topology.shared(2))
    held = [[torch.arange(7, dtype=torch.uint8), torch.tensor([1.5, -2.5, 3.5])], []]
    result = execute(plan, held)[1]
    assert result["m.v"].tolist() == list(range(7)) and result["m.x"].tolist() == [1.5, -2.5, 3.5]
    assert result["m.e"].shape == (0, 4)


@pytest.mark.parametrize(("held", "wanted", "wire"), [("float32", "bfloat16", 2), ("bfloat16", "float32", 2)])
def test_a_cast_travels_in_the_narrower_type(held, wanted, wire):
    plan = build_plan(*two_ranks(source_dtype=held, dtype=wanted), Topology.shared(2))
    summary = plan.summary()
    assert summary["bytes_intra_node"] == summary["lower_bound_cross_slot_bytes"] == 2 * 4 * 4 * wire
    values = torch.tensor([[1.0, 2.5, -3.0, 0.125]] * 4)
    for result in execute(plan, [[values.to(DTYPES[held])]] * 2):
        assert result["m.w"].dtype == DTYPES[wanted] and torch.equal(result["m.w"], values.repeat(2, 1))


def test_what_nobody_holds_is_named():
    held, needed = two_ranks()
    last = [dataclasses.replace(held[1], rank=0)]
    with pytest.raises(WeightSyncError, match=r"t \[start \(0, 0\), shape \(4, 4\)\]"):
        build_plan(last, needed[:1], Topology.shared(1))


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (TINY | {"moe_intermediate_size": 4},
         r"experts\.0\.down_proj\.weight: the trainer has \(16, 8\), the engines \(16, 4\)"),
        (TINY | {"vocab_size": 64}, r"lm_head\.weight: the trainer has \(96, 16\), the engines \(64, 16\)"),
        (TINY | {"vocab_size": 128}, r"lm_head\.weight: the trainer has \(96, 16\), the engines \(128, 16\)"),
        (TINY | {"num_hidden_layers": 3},
         r"layers\.3\.input_layernorm\.weight \(16,\): no engine rank takes it"),
        (TINY | {"num_hidden_layers": 5}, r"layers\.4\..* \(16,\): no trainer rank holds it"),
        (TINY | {"num_key_value_heads": 1},
         r"k_proj\.weight: the trainer has \(8, 16\), the engines \(4, 16\)"),
        (TINY | {"tie_word_embeddings": True}, r"lm_head\.weight \(96, 16\): no engine rank takes it"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, ep=2)], ids=str)
def test_engines_of_another_shape_are_refused_by_name(engine: dict, named: str, layout: Layout) -> None:
    held = trainer_manifests.trainer_rank_manifests(TINY, layout)
    build_plan(held, engine_manifests.engine_rank_manifests(TINY, Layout(tp=2)), Topology.shared(2))
    with pytest.raises(WeightSyncError, match=named):
        build_plan(held, engine_manifests.engine_rank_manifests(engine, Layout(tp=2)), Topology.shared(2))


def test_an_engine_that_leaves_out_the_middle_of_a_tensor_is_refused() -> None:
    held, _ = two_ranks()
    ends = [dataclasses.replace(matrix("m.w", "t", at, 2, 4), name=f"m.{at}") for at in (0, 6)]
    with pytest.raises(WeightSyncError, match=r"t \(8, 4\): the engines take only \[\(\(0, 0\), \(2, 4\)\)"):
        build_plan(held, [RankManifest.of(0, ends), RankManifest.of(1, ends)], Topology.shared(2))


def test_an_element_written_twice_and_a_hole_are_refused():
    held, needed = two_ranks()
    tensor = needed[0].tensors[0]
    twice = dataclasses.replace(tensor, pieces=(*tensor.pieces, TensorSlice("t", (0, 0), (1, 4), (3, 0))))
    with pytest.raises(WeightSyncError, match=r"m\.w.*would write the same elements"):
        build_plan(held, [RankManifest.of(0, [twice]), needed[1]], Topology.shared(2))
    hole = dataclasses.replace(tensor, pieces=(TensorSlice("t", (4, 0), (4, 4), (4, 0)),))
    with pytest.raises(WeightSyncError, match=r"m\.w.*no box covers some of its first 8 rows"):
        build_plan(held, [RankManifest.of(0, [hole]), needed[1]], Topology.shared(2))


def test_digest_is_equal_for_equal_inputs_and_differs_for_any_other():
    world = random_world(11, family="qwen3_moe")
    plans = [build_plan(world.trainers, world.engines, world.topology, world.options) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    other = trainer_manifests.trainer_rank_manifests(TINY, Layout(tp=2, ep=2))
    base = build_plan(
        other, engine_manifests.engine_rank_manifests(TINY, Layout(tp=2)), Topology.shared(2)
    ).digest
    changed = [
        build_plan(trainer_manifests.trainer_rank_manifests(TINY, Layout(tp=1, ep=2, dp=2)),
                   engine_manifests.engine_rank_manifests(TINY, Layout(tp=2)), Topology.shared(2)),
        build_plan(other, engine_manifests.engine_rank_manifests(TINY, Layout(tp=1, dp=2)),
                   Topology.shared(2)),
        build_plan(other, engine_manifests.engine_rank_manifests(TINY, Layout(tp=2)),
                   Topology.shared(2, slots_per_node=1)),
        build_plan(other, engine_manifests.engine_rank_manifests(TINY, Layout(tp=2)),
                   Topology.shared(2), PlanOptions(bucket_bytes=1 << 20)),
    ]  # fmt: skip
    assert len({base, *(plan.digest for plan in changed)}) == 5


def test_plans_do_not_depend_on_hash_order():
    code = (
        "from tests.resharding.worlds import random_world\n"
        "from mrl.resharding.planner.plan import build_plan\n"
        "import hashlib\n"
        "w = random_world(5, family='deepseek_v3')\n"
        "p = build_plan(w.trainers, w.engines, w.topology, w.options)\n"
        "h = hashlib.sha256(repr(p.windows).encode())\n"
        "for s in range(p.topology.num_slots):\n"
        "    for x in p.part(s).windows:\n"
        "        h.update(x.local.tobytes() + x.pack.tobytes() + x.unpack.tobytes())\n"
        "        h.update(repr((x.sends, x.receives)).encode())\n"
        "print(p.digest, h.hexdigest())\n"
    )
    root, started = Path(__file__).parents[2], []
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PATH": ""}
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True))
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert len(outputs) == 1 and outputs.pop().strip()


def test_nearest_holder_same_slot_then_node_then_rail():
    one = matrix("p", "t", 0, 4, 4)
    held = [RankManifest.of(rank, [one]) for rank in range(4)]
    needed = [RankManifest.of(rank, [dataclasses.replace(one, name="m.w")]) for rank in range(3)]
    topology = Topology(
        nodes=(0, 0, 1, 1, 0, 2), rails=(0, 1, 0, 1, 2, 1), trainer_slots=(0, 1, 2, 3), engine_slots=(2, 4, 5)
    )
    plan = build_plan(held, needed, topology)
    pattern = plan.items[0].pattern
    chosen = dict(zip(pattern.engine_rank.tolist(), pattern.senders(0).tolist(), strict=True))
    assert chosen[0] == 2  # its own slot
    assert chosen[1] in (0, 1)  # its node
    assert chosen[2] in (1, 3)  # its rail, in another node


def test_slots_on_the_nodes_they_lie_on_make_the_plan_of_nodes_filled_in_turn():
    """Slots' nodes give the same plan as `mrl plan`; nodes of different sizes have their own rails."""
    held = trainer_manifests.trainer_rank_manifests(TINY, Layout(tp=2, ep=2, dp=4))
    needed = engine_manifests.engine_rank_manifests(TINY, Layout(tp=2, dp=4))
    placed, filled, one = (
        build_plan(held, needed, topology)
        for topology in (
            Topology.shared_slots([0] * 4 + [1] * 4),
            Topology.shared(8, slots_per_node=4),
            Topology.shared(8, slots_per_node=8),
        )
    )
    assert placed.digest == filled.digest != one.digest
    assert placed.traffic.tolist() == filled.traffic.tolist()
    assert one.traffic[2].sum() == 0, "on one node nothing crosses the network"
    assert Topology.shared_slots([3, 3, 5, 3]).rails == (0, 1, 0, 2)
    assert Topology.separate_slots([0, 1, 1]).nodes == (0, 1, 1, 0, 1, 1)
    apart = Topology.separate_pools([0, 0, 0, 1], num_trainers=2)
    assert (apart.trainer_slots, apart.engine_slots, apart.rails) == ((0, 1), (2, 3), (0, 1, 2, 0))


def test_senders_share_the_load():
    """With expert tensor parallelism over 8 engines no trainer sends over 10 % more than the mean."""
    hf = TINY | {"num_experts": 16, "num_hidden_layers": 8}
    held = trainer_manifests.trainer_rank_manifests(hf, Layout(tp=2, pp=2, ep=4, dp=4))
    needed = engine_manifests.engine_rank_manifests(hf, Layout(tp=2, dp=8))
    plan = build_plan(held, needed, Topology.shared(16, slots_per_node=2))
    sent = plan.traffic[3] + plan.traffic[4]
    assert sent.max() <= 1.1 * sent.mean()


def test_interleaved_stages_load_all_senders_in_each_window():
    layout = Layout(tp=1, pp=4, ep=1)
    held = trainer_manifests.trainer_rank_manifests(TINY, layout)
    needed = engine_manifests.engine_rank_manifests(TINY, Layout(tp=2, dp=2))
    plans = {
        joined: build_plan(
            held, needed, Topology.shared(4), PlanOptions(bucket_bytes=8192, interleave_stages=joined)
        )
        for joined in (False, True)
    }
    busiest = {j: sum(int(c.max()) for c in window_traffic(p)) for j, p in plans.items()}
    assert busiest[True] < 0.7 * busiest[False]
    open_modules = {j: most_open(p) for j, p in plans.items()}
    assert open_modules[False] <= open_modules[True]


def window_traffic(plan):
    """Return [2, slots] bytes sent and received per window."""
    traffic = SlotTraffic(plan.topology)
    for window in plan.windows:
        counts = np.zeros(traffic.num_endpoints, dtype=np.int64)
        for step in window:
            item = plan.items[step.item]
            flow = traffic.of(item.pattern, item.ordinal, step.part, step.parts)
            counts[flow.endpoints] += flow.num_bytes
        yield counts.reshape(2, -1)


def most_open(plan) -> int:
    """Return the most modules left open at the end of a window on slot 0."""
    opened, most = set(), 0
    for window in plan.part(0).windows:
        opened |= set(window.opens)
        opened -= set(window.closes)
        most = max(most, len(opened))
    return most


def test_every_module_opens_and_closes_once():
    world = random_world(23, family="deepseek_v3")
    plan = build_plan(world.trainers, world.engines, world.topology, PlanOptions(bucket_bytes=2048))
    for slot in world.topology.engine_slots:
        part = plan.part(slot)
        opens = sorted(m for window in part.windows for m in window.opens)
        closes = sorted(m for window in part.windows for m in window.closes)
        assert opens == closes == list(range(len(part.modules)))


def test_topologies_that_do_not_fit_are_refused():
    held, needed = two_ranks()
    with pytest.raises(ConfigError, match="two trainer ranks share a slot"):
        Topology((0, 0), (0, 1), (0, 0), (0, 1))
    with pytest.raises(ConfigError, match="2 trainer manifests but the topology places 3"):
        build_plan(held, needed, Topology.shared(3))
    plan = build_plan(held, needed, Topology.shared(2))
    with pytest.raises(ConfigError, match="slot 2 is outside the plan's 2 slots"):
        plan.part(2)


def model_bytes(hf: dict) -> int:
    """Return the checkpoint's size in bfloat16 (correction biases are float32)."""
    widths = {"bfloat16": 2, "float32": 4}
    return sum(int(np.prod(t.shape)) * widths[t.dtype] for t in family_of(hf).checkpoint_tensors(hf))


def test_qwen3_235b_on_64_gpus_moves_what_arithmetic_says():
    """Each of 8 nodes trains one of 8 stages and receives the others once; its own experts stay."""
    layout = Layout(tp=4, pp=8, ep=8, dp=2)
    plan = build_plan(
        trainer_manifests.trainer_rank_manifests(QWEN3_235B, layout),
        engine_manifests.engine_rank_manifests(QWEN3_235B, Layout(tp=8, ep=8, dp=8)),
        Topology.shared(64),
    )
    summary = plan.summary()
    moved = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    assert moved == summary["lower_bound_cross_slot_bytes"]
    experts = 94 * 128 * 3 * 4096 * 1536 * 2
    assert summary["bytes_local"] >= experts
    assert 0.87 < summary["bytes_inter_node"] / summary["bytes_needed"] < 0.88
    assert summary["bytes_needed"] > 8 * model_bytes(QWEN3_235B)
    assert plan.traffic[4].max() < 1.08 * plan.traffic[4].mean()


BIG = """
import json, sys, time
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.plan import build_plan
from mrl.resharding.planner.topology import Topology
hf, train, rollout = json.loads(sys.argv[1])
start = time.process_time()
train, rollout = Layout(**train), Layout(**rollout)
trainers = trainer_manifests.trainer_rank_manifests(hf, train)
plan = build_plan(
    trainers, engine_manifests.engine_rank_manifests(hf, rollout), Topology.shared(train.world_size)
)
part = plan.part(train.world_size // 2 + 3)
seconds = time.process_time() - start
with open("/proc/self/status") as status:  # getrusage's peak has that of the process that started this one
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([seconds, peak_kib << 10, sum(len(w.local) + len(w.unpack) for w in part.windows)]))
"""


@pytest.mark.parametrize(
    ("hf", "gpus", "tp", "ep", "most_seconds"),
    [
        pytest.param(QWEN3_235B, 1024, 8, 8, 15, id="qwen3-235b-ep8"),
        pytest.param(DEEPSEEK_V3, 4096, 32, 32, 30, id="deepseek-v3-ep32", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK_V3, 4096, 16, 1, 60, id="deepseek-v3-tp16-4096", marks=pytest.mark.slow),
    ],
)
def test_one_rank_plans_a_real_model_in_time(hf, gpus, tp, ep, most_seconds):
    """Measure processor seconds of a fresh process, independent of the machine's load."""
    layouts = [{"tp": 4, "pp": 8, "ep": 8, "dp": gpus // 32}, {"tp": tp, "ep": ep, "dp": gpus // tp}]
    done = subprocess.run(
        [sys.executable, "-c", BIG, json.dumps([hf, *layouts])],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    seconds, peak_bytes, copies = json.loads(done.stdout)
    assert seconds < most_seconds and peak_bytes < 1 << 30 and copies > 1000
