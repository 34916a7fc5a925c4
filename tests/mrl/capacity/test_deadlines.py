"""The waits of a run against their deadlines: what ends a run is an error of its plan, what comes near is a warning."""

import functools

import pytest

from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.config.load import load
from mrl.files import CONFIGS


def tree(*words: str, recipe: str = "qwen3_30b_a3b"):
    return capacity_report(load([CONFIGS / f"{recipe}.yaml"], words), load_hardware("8x80gb")).tree


def wait(found: dict, name: str) -> dict:
    return next(each for each in found["step"]["deadlines"] if each["name"] == name)


def test_a_round_in_bfloat16_outlasts_its_deadline_and_one_in_float8_does_not() -> None:
    """Engines in bfloat16 leave a KV cache for 14 sequences."""
    recipe = "qwen3_235b_a22b"
    wide, narrow = tree("rollout.quantization=none", recipe=recipe), tree(recipe=recipe)
    assert any(line.startswith("one round of generate takes") for line in wide["errors"])
    assert not wide["fits"]
    assert narrow["fits"]
    round_of_generate = wait(narrow, "one round of generate")
    assert round_of_generate["seconds"] < round_of_generate["deadline"] / 2


@pytest.mark.parametrize(
    ("words", "name", "setting"),
    [
        (("loop.phase_deadline_seconds=600",), "one round of generate", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=50",), "one pass for log-probs", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=50",), "one update", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=300",), "one checkpoint", "loop.phase_deadline_seconds"),
        (("sync.deadline_seconds=0.08",), "one weight sync", "twice sync.deadline_seconds"),
        (("export.every_steps=20", "export.deadline_seconds=100"), "one export", "export.deadline_seconds"),
    ],
)  # fmt: skip
def test_each_wait_near_its_deadline_is_a_warning_that_names_the_setting(words, name, setting) -> None:
    lines = [line for line in tree(*words)["warnings"] if line.startswith(f"{name} takes")]
    assert len(lines) == 1
    assert f"of {setting}" in lines[0]


def test_rounds_lengthen_the_step_and_no_wait() -> None:
    """Each round has the phase's deadline for itself, as mrl/loops/collect.py waits."""
    one, six = (tree(f"algorithm.filter.max_rounds={rounds}") for rounds in (1, 6))
    assert one["step"]["deadlines"] == six["step"]["deadlines"]
    generate = one["step"]["seconds"]["generate"]
    assert one["step"]["longest_seconds"] == one["step"]["seconds"]["total"]
    assert six["step"]["longest_seconds"] == pytest.approx(one["step"]["longest_seconds"] + 5 * generate)
    few = tree("algorithm.filter.max_rounds=6", "loop.prompts_per_step=2048")
    assert few["step"]["most_rounds"] == 2, "a step samples 4096 prompts at most"


def test_a_run_that_never_saves_waits_for_no_checkpoint() -> None:
    found = tree("loop.checkpoint.every_steps=0", "loop.checkpoint.at_end=false")
    assert [each["name"] for each in found["step"]["deadlines"] if "checkpoint" in each["name"]] == []
    assert [moment["moment"] for moment in found["host_memory"]] == ["engines serve"]


def test_the_reference_is_waited_for_with_the_pass_that_it_is_beside() -> None:
    """That for old log-probs, or the only update; in a call of its own where it takes the routes of the first."""
    kl = "algorithm.kl={location: loss, kind: k3, coefficient: 0.01}"
    of = functools.partial(tree, recipe="qwen3_235b_a22b")
    one = ("algorithm.minibatches=1", "algorithm.epochs=1")
    plain, passed = of("algorithm.minibatches=2"), of("algorithm.minibatches=2", kl)
    assert wait(passed, "one update") == wait(plain, "one update")
    ratio = (
        wait(passed, "one pass for log-probs")["seconds"] / wait(plain, "one pass for log-probs")["seconds"]
    )
    assert 1.9 < ratio < 2.0  # it does not drain the pipeline
    apart = of("algorithm.minibatches=2", kl, "routing.replay=trainer")
    assert wait(apart, "one pass for log-probs") == wait(plain, "one pass for log-probs")
    alone, updated = of(*one), of(*one, kl)
    assert "one pass for log-probs" not in {each["name"] for each in updated["step"]["deadlines"]}
    more = wait(updated, "one update")["seconds"] - wait(alone, "one update")["seconds"]
    assert more == pytest.approx(updated["step"]["seconds"]["log_probs"])
    assert updated["step"]["seconds"]["log_probs"] < apart["step"]["seconds"]["log_probs"] / 2


def test_teachers_are_waited_for_with_the_update_that_takes_their_distributions() -> None:
    words = ("algorithm.minibatches=1", "algorithm.epochs=1")
    alone, taught = tree(*words), tree(*words, "algorithm.distillation={teachers: {default: /teacher}}")
    assert "one pass for log-probs" not in {each["name"] for each in taught["step"]["deadlines"]}
    more = wait(taught, "one update")["seconds"] - wait(alone, "one update")["seconds"]
    assert more == pytest.approx(taught["step"]["seconds"]["log_probs"]) and more > 0
