"""`mrl plan --stream`: placements, their times, the search against all choices, and what people see."""

import json

import pytest

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.cli import main
from mrl.config.load import load
from mrl.files import CONFIGS
from mrl.simulation.places import Places, with_engine_slots
from mrl.simulation.report import planned

QWEN_30B = CONFIGS / "qwen3_30b_a3b.yaml"
SMALL = ("training.layout.dp=16", "loop.prompts_per_step=16", "rollout.max_response_tokens=2048")
"""32 slots, steps that take a moment to simulate."""


@pytest.fixture(scope="module")
def config():
    return load([QWEN_30B], SMALL)


def test_the_slots_are_given_out_again(config) -> None:
    assert with_engine_slots(config, 0) == config
    placed = with_engine_slots(config, 16)
    assert (
        placed is not None and placed.num_slots == config.num_slots == 16 + placed.training.layout.world_size
    )
    assert with_engine_slots(config, 3) is None, "half an engine"


def test_shared_slots_take_the_seconds_of_the_estimate(config) -> None:
    hardware = load_hardware("8x80gb")
    leaves, estimate = Places(config, hardware).leaves(0), Estimate(config, hardware)
    seconds, work = estimate.seconds, estimate.work
    training = seconds["log_probs"] + seconds["update"] + seconds["gradient_exchange"]
    assert leaves.train_seconds(work.tokens) == pytest.approx(training)
    assert (leaves.sync_seconds, leaves.turn_seconds) == (seconds["sync"], seconds["offload"])
    made, speed = estimate.generation, leaves.engine
    context = work.prompt_tokens + work.response_tokens / 2
    prefill = made.samples * work.prompt_tokens * speed.prefill_seconds
    decode = made.decode_steps * speed.step(made.concurrent, made.concurrent * context)
    assert prefill + decode == pytest.approx(seconds["generate"])


def test_the_advice_is_near_the_best_of_all_choices(config) -> None:
    plan = planned(config, load_hardware("8x80gb"), most_age=2, every_choice=True)
    assert plan.best is not None
    assert plan.advised.tokens_per_second >= 0.95 * plan.best.tokens_per_second
    assert plan.advised.tokens_per_second > plan.base.tokens_per_second
    assert plan.advised.choice.max_age <= 2 and not plan.problems
    total = sum(plan.advised.ages.values())
    assert total == pytest.approx(1.0) and max(plan.advised.ages) <= plan.advised.age_bound


def test_people_and_programs_see_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(QWEN_30B), *SMALL, "--stream", "--max-age", "1"]
    assert main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    table = capsys.readouterr().out
    choice = tree["advised"]["choice"]
    assert f"stream.max_age={choice['max_age']} launch.engine_slots={choice['engine_slots']}" in table
    assert f"{tree['advised']['speed_up']:.2f} times on_policy" in table


def test_amounts_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QWEN_30B), "--stream", "--mean", "1000000"]) == 2
    assert "--mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "setting", "named"),
    [
        ("qwen3_30b_a3b_tools", "run.seed=0", "remove the section agent"),
    ],
)
def test_what_is_not_simulated_is_refused(
    recipe: str, setting: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["loop.schedule=stream", "algorithm.correction={kind: truncated, high: 2.0}", setting]
    files = [str(QWEN_30B)] + [str(CONFIGS / f"{recipe}.yaml")] * (recipe != QWEN_30B.stem)
    assert main(["plan", *files, *words, "--stream"]) == 2
    assert named in capsys.readouterr().err
