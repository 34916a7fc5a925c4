"""A run's waits against their deadlines: one beyond it is an error of the plan, one near it a warning."""

import functools

import pytest

from mrl.capacity.advice import advise
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.capacity.phase_deadlines import Wait, most_rounds
from mrl.config.load import load
from mrl.files import CONFIGS


def estimate(*words: str, recipe: str = "qwen3_30b_a3b") -> Estimate:
    return Estimate(load([CONFIGS / f"{recipe}.yaml"], words), load_hardware("8x80gb"))


def wait(plan: Estimate, name: str) -> Wait:
    return next(entry for entry in plan.waits if entry.name == name)


def test_a_round_in_bfloat16_outlasts_its_deadline_and_one_in_float8_does_not() -> None:
    """Engines in bfloat16 leave a KV cache for 14 sequences."""
    recipe = "qwen3_235b_a22b"
    wide, narrow = estimate("rollout.quantization=none", recipe=recipe), estimate(recipe=recipe)
    assert any(line.startswith("one round of generate takes") for line in advise(wide).errors)
    assert advise(narrow).errors == []
    assert wait(narrow, "one round of generate").share < 0.5


@pytest.mark.parametrize(
    ("words", "name", "setting"),
    [
        (("loop.phase_deadline_seconds=600",), "one round of generate", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=100",), "one pass for log-probs", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=100",), "one update", "loop.phase_deadline_seconds"),
        (("loop.phase_deadline_seconds=300",), "one checkpoint", "loop.phase_deadline_seconds"),
        (("sync.deadline_seconds=0.08",), "one weight sync", "twice sync.deadline_seconds"),
        (("export.every_steps=20", "export.deadline_seconds=100"), "one export", "export.deadline_seconds"),
    ],
)  # fmt: skip
def test_each_wait_near_its_deadline_is_a_warning_that_names_the_setting(words, name, setting) -> None:
    lines = [line for line in advise(estimate(*words)).warnings if line.startswith(f"{name} takes")]
    assert len(lines) == 1
    assert f"of {setting}" in lines[0]


def test_rounds_lengthen_the_step_and_no_wait() -> None:
    """Each round has the phase's deadline to itself, as mrl/loops/collect.py waits."""
    one, six = (estimate(f"algorithm.filter.max_rounds={rounds}") for rounds in (1, 6))
    assert one.waits == six.waits and one.seconds == six.seconds
    assert (most_rounds(one.config), most_rounds(six.config)) == (1, 6)
    few = estimate("algorithm.filter.max_rounds=6", "loop.prompts_per_step=2048")
    assert most_rounds(few.config) == 2, "a step samples 4096 prompts at most"


def test_a_run_that_never_saves_waits_for_no_checkpoint() -> None:
    plan = estimate("loop.checkpoint.every_steps=0", "loop.checkpoint.at_end=false")
    assert [entry.name for entry in plan.waits if "checkpoint" in entry.name] == []
    assert [moment.name for moment in plan.host] == ["engines serve"]


def test_the_reference_is_waited_for_with_the_pass_that_it_is_beside() -> None:
    """It runs in the pass for old log-probs or the only update; separately if it takes their routes."""
    kl = "algorithm.kl={location: loss, kind: k3, coefficient: 0.01}"
    of = functools.partial(estimate, recipe="qwen3_235b_a22b")
    one = ("algorithm.minibatches=1", "algorithm.epochs=1")
    plain, passed = of("algorithm.minibatches=2"), of("algorithm.minibatches=2", kl)
    assert wait(passed, "one update") == wait(plain, "one update")
    ratio = wait(passed, "one pass for log-probs").seconds / wait(plain, "one pass for log-probs").seconds
    assert 1.9 < ratio < 2.0  # it does not drain the pipeline
    apart = of("algorithm.minibatches=2", kl, "routing.replay=trainer")
    assert wait(apart, "one pass for log-probs") == wait(plain, "one pass for log-probs")
    alone, updated = of(*one), of(*one, kl)
    assert "one pass for log-probs" not in {entry.name for entry in updated.waits}
    extra = wait(updated, "one update").seconds - wait(alone, "one update").seconds
    assert extra == pytest.approx(updated.seconds["log_probs"])
    assert updated.seconds["log_probs"] < apart.seconds["log_probs"] / 2


def test_teachers_are_waited_for_with_the_update_that_takes_their_distributions() -> None:
    words = ("algorithm.minibatches=1", "algorithm.epochs=1")
    alone, taught = (
        estimate(*words),
        estimate(*words, "algorithm.distillation={teachers: {default: /teacher}}"),
    )
    assert "one pass for log-probs" not in {entry.name for entry in taught.waits}
    extra = wait(taught, "one update").seconds - wait(alone, "one update").seconds
    assert extra == pytest.approx(taught.seconds["log_probs"]) and extra > 0
