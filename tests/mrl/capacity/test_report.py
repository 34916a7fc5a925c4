"""`mrl plan` as people see it: the table, layouts that cannot be split, layouts that do not fit."""

import pytest
import yaml

from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.cli import main
from mrl.config.load import load
from mrl.files import CONFIGS
from mrl.rollout import passthrough_args

QWEN_30B = CONFIGS / "qwen3_30b_a3b.yaml"


def report(*words: str, hardware: str = "8x80gb"):
    return capacity_report(load([QWEN_30B], words), load_hardware(hardware))


def test_each_pool_has_its_own_memory() -> None:
    """With engine slots, neither side's slot contains anything of the other's, and nothing is off-loaded."""
    shown = report("training.layout.dp=4", "rollout.tp=2", "launch.engine_slots=8")
    pools = shown.estimate
    trainer = [event.parts for event in pools.timeline if event.name.startswith("trainer slot, ")]
    engine = [event.parts for event in pools.timeline if event.name.startswith("engine slot, ")]
    assert len(trainer) == 3 and len(engine) == 2
    assert not any({"rollout weights", "KV cache", "engine process"} & set(parts) for parts in trainer)
    assert not any({"trainer weights", "optimizer", "trainer process"} & set(parts) for parts in engine)
    assert all({"optimizer", "gradients"} <= set(parts) for parts in trainer)
    assert pools.seconds["offload"] == 0 and sum(pools.traffic.local) == 0
    assert "hardware  3 nodes of" in shown.table()
    assert "4 engines of tp2 on their own 8 slots" in shown.table()


def test_weights_that_come_while_engines_generate_are_counted_where_they_wait() -> None:
    """On GPUs that is the host of the engines' node: 8 ranks of tp2 have four copies of the weights."""
    words = ("training.layout.dp=4", "rollout.tp=2", "launch.engine_slots=8", "loop.schedule=stream")
    words += ("stream.max_staleness=1",)
    off, on = (report(*words, f"sync.overlap={choice}").estimate for choice in ("auto", "on"))
    assert not any("new weights" in event.parts for event in [*off.host, *on.timeline])
    (moment,) = (event for event in on.host if "new weights" in event.parts)
    assert moment.name == "node of engines"
    assert moment.parts == {"new weights": 8 * on.engine.weights}


def test_what_does_not_fit_names_its_pool() -> None:
    small = ("training.layout.ep=2", "training.layout.tp=2", "training.layout.dp=1", "launch.engine_slots=4")
    refused = report(*small, "rollout.tp=2")
    assert not refused.fits
    assert {line.split(" needs")[0] for line in refused.advice.errors} == {
        f"'trainer slot, {moment}'" for moment in ("log-probs", "update", "weight sync")
    }


def test_a_pass_for_old_log_probs_is_counted_where_it_is_made() -> None:
    one, recomputed, several = (
        report(f"algorithm.minibatches={count}", f"algorithm.old_logprobs={kind}").estimate.seconds
        for count, kind in ((1, "auto"), (1, "recomputed"), (4, "auto"))
    )
    assert one["log_probs"] == 0 < recomputed["log_probs"] == several["log_probs"]


def test_a_micro_batch_is_not_larger_than_a_ranks_share_of_an_update() -> None:
    """The whole step has 4 x 2 samples of at most 1024 + 1000 tokens, over two replicas and two updates."""
    small = ("loop.prompts_per_step=4", "loop.samples_per_prompt=2", "algorithm.minibatches=2")
    lengths = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=1000")
    for limit, tokens in ((1 << 20, 2 * 2024), (3000, 3000), (10, 2024)):
        assert (
            report(*small, *lengths, f"training.microbatch_tokens={limit}").estimate.microbatches[0] == tokens
        )


@pytest.mark.parametrize(("rollout_tp", "fits"), [(2, True), (1, False)])
def test_at_most_ten_lines_say_what_a_user_decides_on(rollout_tp: int, fits: bool) -> None:
    shown = report(
        *() if fits else ("training.layout.ep=2", "training.layout.dp=2"), f"rollout.tp={rollout_tp}"
    )
    summary, *tables = shown.table().split("\n\n")
    lines = dict(line.split(maxsplit=1) for line in summary.splitlines())
    assert len(lines) <= 10 and shown.fits == fits and any("memory over a step" in table for table in tables)
    assert lines["verdict"] == ("it fits" if fits else f"it does NOT fit: {shown.advice.errors[0]}")
    fullest = min(shown.estimate.timeline, key=lambda event: event.free)
    assert f"GPU in '{fullest.name}', {fullest.total / 1e9:.1f} of 84.9 GB" in lines["memory"]
    seconds = sum(shown.estimate.seconds.values())
    assert lines["step"].startswith(f"{seconds:,.0f} s estimated (generate ")
    low, high = (sum(ends) for ends in zip(*shown.estimate.seconds_range.values(), strict=True))
    assert f"; {low:,.0f} to {high:,.0f} s from the ranges" in lines["step"] and low < seconds < high
    advice = shown.advice.warnings if fits else shown.advice.suggestions
    assert lines["change"] == f"first: {advice[0]}" and "30,532,122,624 parameters" in lines["model"]


def test_too_little_memory_is_an_error_with_a_way_out() -> None:
    refused = report("training.layout.ep=2", "training.layout.tp=2", "training.layout.dp=1", "rollout.tp=1")
    assert not refused.fits
    assert any(line.startswith("'update' needs") for line in refused.advice.errors)
    assert any("training.layout.ep" in line for line in refused.advice.suggestions)
    assert "does NOT fit" in refused.table()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("training.layout.ep=3", "training.layout.dp=3"),
         "experts (128) are not divisible by training.layout.ep = 3"),
        (("training.layout.tp=3", "training.layout.ep=1", "rollout.tp=1"),
         "attention heads (32) are not divisible"),
        (("training.layout.pp=49", "training.layout.dp=2"), "48 layers cannot fill pp x vpp = 49 x 1 stages"),
        (("rollout.tp=3", "training.layout.dp=6"),
         "experts (128) are not divisible by rollout.tp (expert_parallel) = 3"),
        (("rollout.tp=4", "rollout.expert_parallel=false", "rollout.quantization=fp8_block"),
         "must begin on a block of 128; lower rollout.tp"),
        (("rollout.tp=8", "launch.slots_per_node=6"),
         "engine 0 would have 6 + 2 of its tp ranks on nodes [0, 1], which must share them equally; "
         "choose a rollout.tp"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_said_before_anything_else(words: tuple[str, ...], message: str) -> None:
    refused = report(*words)
    assert not refused.fits
    assert any(message in line for line in refused.advice.errors), refused.advice.errors
    assert "memory over a step" not in refused.table()
    assert "does NOT fit" in refused.table()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.tp=4", "rollout.expert_parallel=false"),
         "rollout.expert_parallel=true distributes whole experts"),
        (("training.layout.pp=5", "training.layout.dp=2"), "48 layers do not divide into pp x vpp = 5 x 1"),
        (("training.layout.tp=8",), "query groups are cut"),
        (("rollout.quantization=fp8_block", "algorithm.correction.kind='off'"),
         "truncated is the usual choice"),
        (("rollout.quantization=fp8_block", "loop.max_rollout_mismatch=0.01"),
         "quantised weights alone cause"),
        (("rollout.quantization=fp8_block", "training.layout.ep=2", "training.layout.etp=4"),
         "cuts tensors inside blocks of 128"),
        (("training.layout.tp=16",), "spans nodes of 8"),
        (("rollout.tp=16", "training.layout.dp=4"),
         "tp ranks of an engine are on 2 nodes, and the two all-reduces of each layer "
         "(48 x 2 of 2048 numbers per token) cross"),
        (("training.router_aux_loss=0.001",), "works against the reward"),
        (("training.layout.pp=4", "training.layout.dp=4", "training.layout.ep=16", "rollout.tp=8"),
         "rail misalignment"),
    ],
)  # fmt: skip
def test_warnings(words: tuple[str, ...], message: str) -> None:
    assert any(message in line for line in report(*words).advice.warnings), report(*words).advice.warnings


def test_host_memory_that_is_too_small_is_an_error() -> None:
    small = load_hardware("8x80gb").model_copy(update={"host_memory_bytes": 10**11})
    config = load([QWEN_30B])
    assert any(
        "100.0 GB" in line and "host memory" in line for line in capacity_report(config, small).advice.errors
    )
    words = ["training.offload=never", "loop.checkpoint.every_steps=0", "loop.checkpoint.at_end=false"]
    never = load([QWEN_30B], words)
    assert not any("host memory" in line for line in capacity_report(never, small).advice.errors)


def test_what_a_sleeping_engine_keeps_can_be_given_back() -> None:
    """The proposed settings are fields of vLLM's EngineArgs that nothing else decides."""
    small = load_hardware("8x80gb").model_copy(update={"engine_process_bytes": 40 * 10**9})
    (line,) = (
        text
        for text in capacity_report(load([QWEN_30B]), small).advice.suggestions
        if text.startswith("rollout.engine_args=")
    )
    arguments = yaml.safe_load(line.removeprefix("rollout.engine_args=").partition("}")[0] + "}")
    assert set(arguments.values()) == {True}
    assert passthrough_args.argument_faults(arguments) == []


def test_the_recipes_layout_stays_on_its_rails() -> None:
    shown = report("training.layout.pp=4", "training.layout.dp=2", "rollout.tp=8")
    traffic = shown.estimate.traffic
    assert traffic.off_rail < 0.05 * sum(traffic.network_in)
    assert not any("rail" in line for line in shown.advice.warnings)


@pytest.mark.parametrize("word", ["training.layout.tp=128", "rollout.gpu_memory_utilization=0.99"])
def test_a_script_sees_what_does_not_fit(word, capsys) -> None:
    """A refused layout and too little memory both set the exit code, and the whole answer is printed."""
    assert main(["plan", str(QWEN_30B), word]) == 1
    assert "verdict   it does NOT fit: " in capsys.readouterr().out


def test_quantised_engines_take_half_the_bytes_and_leave_more_for_their_cache() -> None:
    wide, narrow = (report(f"rollout.quantization={form}") for form in ("none", "fp8_block"))
    assert narrow.estimate.engine.weights < 0.56 * wide.estimate.engine.weights
    assert narrow.estimate.engine.kv_cache > wide.estimate.engine.kv_cache
    corrected = report("rollout.quantization=fp8_block", "algorithm.correction.kind=truncated")
    assert not any("quantization" in line for line in corrected.advice.warnings + wide.advice.warnings)
