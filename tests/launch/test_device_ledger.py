"""Whole runs over pretended GPUs: every shipped recipe fits at every moment, as the capacity estimate says, and each fault of memory
that a real GPU would show fails here with its process and moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mrl.training.worker as worker
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.config.load import load
from mrl.errors import MrlError
from mrl.files import CONFIGS
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.training.optimizer import Optimizer
from mrl.training.platform.parameter_memory import ParameterMemory
from tests.support.device_ledger import Ledger, Overcommit
from tests.support.pretended_run import PretendedRun
from tests.support.recipes import cases

SMALLEST = (CONFIGS / "qwen3_30b_a3b.yaml",)
SHORT = ("loop.steps=2", "loop.checkpoint.every_steps=1", "loop.validation.every_steps=0")
WITHOUT_VALIDATION = ("loop.validation.before_training=false", "loop.validation.after_training=false")


def run(
    files: tuple[Path, ...], hardware: str, monkeypatch: pytest.MonkeyPatch, *words: str, resumes: bool = True
) -> PretendedRun:
    """Start, resume, and two steps with a checkpoint each."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = load(files, [*SHORT, *WITHOUT_VALIDATION, *words])
    pretended = PretendedRun(Estimate(config, load_hardware(hardware)), monkeypatch)
    assert pretended.start(resumes=resumes).run() == "done"
    return pretended


@pytest.mark.parametrize(
    ("files", "nodes", "hardware"),
    [case if len(case[0]) == 1 else pytest.param(*case, marks=pytest.mark.slow) for case in cases()],
    ids=lambda value: getattr(value, "stem", None),
)
def test_every_recipe_fits_at_every_moment(
    files: tuple[Path, ...], nodes: int, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger and the estimate agree on what the fullest slot holds; where an engine is awake, no cache holds anything."""
    pretended = run(files, hardware, monkeypatch)
    estimate = pretended.estimate
    device = next(p.rank for p in estimate.layout.places() if p.pp == estimate.fullest_stage)
    expected = {event.name: event.total for event in estimate.timeline}
    found = {event.name: pretended.ledger.marks[event.name, device][0] for event in estimate.timeline}
    assert found == expected
    for event in ("generate", "rollout weights woke", "sync", "trainer weights left"):
        assert pretended.ledger.marks[event, device][1] == 0, event


def test_a_reference_takes_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("algorithm.kl.location=loss", "algorithm.kl.coefficient=0.001")
    assert run(SMALLEST, "8x80gb", monkeypatch, *words).config.algorithm.needs_reference


@pytest.mark.parametrize("estimator", ["sampled", "top_k", "exact"])
def test_teachers_take_of_the_device_what_the_estimate_says(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing with sampled tokens; and their weights lie in the host's memory."""
    words = f"algorithm.distillation={{teachers: {{default: one, other: two}}, estimator: {estimator}}}"
    pretended = run(SMALLEST, "8x80gb", monkeypatch, words)
    estimate, plain = pretended.estimate, Estimate(load(SMALLEST), load_hardware("8x80gb"))
    assert (estimate.slot.lessons > 0) == (estimator != "sampled")
    (update,) = (event for event in estimate.timeline if event.name == "update")
    assert update.parts.get("teachers", 0) == estimate.slot.lessons
    ranks = min(estimate.hardware.gpus_per_node, estimate.layout.world_size)
    teachers = [
        event.parts.get("teachers", 0)
        for each in (estimate, plain)
        for event in each.host
        if event.name == "engines serve"
    ]
    assert teachers == [2 * ranks * estimate.slot.weights, 0]


def start_together(hybrid: Hybrid) -> None:
    hybrid.train.wait(hybrid.train.start())
    hybrid.rollout.wait(hybrid.rollout.start())


def sleep_before_the_trace(hybrid: Hybrid) -> None:
    hybrid.rollout.wait(hybrid.rollout.start())
    hybrid.rollout.sleep()
    hybrid.rollout.engine_ranks()


def wake_all_at_once(group: RolloutGroup, tag: str) -> None:
    group.on_all(lambda actor: actor.engine.wake())


def nothing(*arguments: Any, **options: Any) -> None: ...


FAULTS: dict[str, tuple[Any, str, Callable[..., None], str]] = {
    "both sides are built at once": (
        Hybrid,
        "start",
        start_together,
        "engine 0.*free on device 0 at its start",
    ),
    "manifests of sleeping engines": (Hybrid, "start", sleep_before_the_trace, "engine 0.*while it sleeps"),
    "torch's cache is kept": (
        worker.device_memory,
        "give_back",
        nothing,
        "engine 0 asks device 0.*first_sync",
    ),
    "the optimizer stays": (Optimizer, "offload", nothing, "engine 0 asks device 0"),
    "gradients stay": (ParameterMemory, "free_gradients", nothing, "engine 0 asks device 0"),
    "parameters stay": (ParameterMemory, "offload", nothing, "engine 0 asks device 0"),
    "engines never sleep": (RolloutGroup, "sleep", nothing, "trainer rank 0 asks device 0.*trainers"),
    "the cache wakes before the sync": (
        RolloutGroup,
        "wake",
        wake_all_at_once,
        "engine 0 asks device 0.*kv_cache",
    ),
    "the trainer does not come back": (worker.TrainedModel, "reload", nothing, "off-loaded in log-probs"),
}
"""What is done wrong -> where, and what is said of it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_memory_fails_with_its_process_and_moment(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong, said = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((MrlError, Overcommit, ValueError, AssertionError), match=f"(?s){said}"):
        run(SMALLEST, "8x80gb", monkeypatch)


def test_a_process_takes_its_own_cache_first_and_another_never_does() -> None:
    ledger = Ledger(1, 10, moment=lambda: "update")
    ledger.hold("trainer rank 0", 0, "activations", 8)
    ledger.hold("trainer rank 0", 0, "activations", 0)
    ledger.hold("trainer rank 0", 0, "gradients", 5)
    assert ledger.free(0) == 2
    with pytest.raises(
        Overcommit, match=r"engine 0 asks device 0 for weights.*in update.*torch's cache 0\.0"
    ):
        ledger.hold("engine 0", 0, "weights", 3)
