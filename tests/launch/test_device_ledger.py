"""Whole runs over pretended GPUs: every shipped recipe fits at every moment, as the capacity estimate says, and each fault of memory
that a real GPU would show fails here with its process and moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.device_allocator import AllocationData, cumem
from vllm.device_allocator.cumem import CuMemAllocator

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
SHORT = (
    *(
        "loop.steps=2",
        "loop.checkpoint.every_steps=1",
        "loop.validation.every_steps=0",
        "export.every_steps=1",
    ),
    *("loop.validation.before_training=false", "loop.validation.after_training=false"),
)


def run(
    files: tuple[Path, ...],
    hardware: str,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *words: str,
    **changes: int,
) -> PretendedRun:
    """Start, resume, and two steps with a checkpoint and an export each. `changes`: of the hardware."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = load(files, [*SHORT, *words])
    devices = load_hardware(hardware).model_copy(update=changes)
    pretended = PretendedRun(Estimate(config, devices), monkeypatch)
    assert pretended.start(folder, resumes=True).run() == "done"
    assert pretended.exported[2] == "", "an export takes nothing of a device because it sees none"
    return pretended


def agrees(pretended: PretendedRun) -> None:
    """The ledger and the estimate say the same of what the fullest slot holds; where the other process works, no cache of a
    trainer rank holds anything, and of an engine's what a weight sync left until the KV cache wakes."""
    estimate = pretended.estimate
    device = next(p.rank for p in estimate.layout.places() if p.pp == estimate.fullest_stage)
    expected = {event.name: event.total for event in estimate.timeline}
    marks = {event: pretended.ledger.marks[event, device] for event in expected}
    assert {event: held for event, (held, _) in marks.items()} == expected
    left = {
        "rollout weights woke": 0,
        "sync": 0,
        "trainer weights left": estimate.slot.staging,
        "generate": 0,
    }
    assert {event: marks[event][1] for event in left} == left


@pytest.mark.parametrize(
    ("files", "nodes", "hardware"), cases(), ids=lambda value: getattr(value, "stem", None)
)
def test_every_recipe_fits_at_every_moment(
    files: tuple[Path, ...], nodes: int, hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agrees(run(files, hardware, monkeypatch, tmp_path))


def test_the_quickstart_of_one_gpu_fits_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = tuple(
        CONFIGS / f"{name}.yaml" for name in ("quickstart", "quickstart_gpu", "quickstart_gpu_model")
    )
    pretended = run(files, "8x80gb", monkeypatch, tmp_path, gpus_per_node=1)
    assert pretended.config.num_slots == 1
    agrees(pretended)


FEATURES = {
    "half of the optimizer's state rests in the host's memory": ("training.optimizer.offload_fraction=0.5",),
    "adapters": ("training.lora={rank: 16}",),
    "a critic": (
        *("algorithm.estimator={name: gae}", "critic.optimizer.moments_dtype=bfloat16"),
        "training.optimizer.moments_dtype=bfloat16",
    ),
    "routes of the engine": ("routing.replay=engine",),
    "checkpoints beside training": ("loop.checkpoint.beside_training=true",),
    "float8 engines": ("rollout.quantization=fp8_block",),
    "a stream": ("loop.schedule=stream",),
}
"""What a recipe may be given beside its own -> how."""


@pytest.mark.parametrize("feature", FEATURES)
def test_a_recipe_fits_with(feature: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = (*SMALLEST, CONFIGS / "layouts" / "qwen3_30b_a3b_1x8x141gb.yaml")
    agrees(run(files, "8x141gb", monkeypatch, tmp_path, *FEATURES[feature]))


def test_engines_on_slots_of_their_own_fit_beside_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("loop.schedule=stream", "launch.engine_slots=8")
    pretended = run(SMALLEST, "8x80gb", monkeypatch, tmp_path, *words)
    slots = {"trainer slot": 0, "engine slot": pretended.estimate.layout.world_size}
    for event in pretended.estimate.timeline:
        slot, name = event.name.split(", ")
        marked = "weights sent" if event.name == "trainer slot, sync" else name
        assert pretended.ledger.marks[marked, slots[slot]][0] == event.total, event.name


def test_a_reference_takes_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("algorithm.kl.location=loss", "algorithm.kl.coefficient=0.001")
    pretended = run(SMALLEST, "8x80gb", monkeypatch, tmp_path, *words)
    assert pretended.config.algorithm.needs_reference
    agrees(pretended)


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
def test_teachers_take_of_the_device_what_the_estimate_says(
    estimator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing with sampled tokens; and their weights lie in the host's memory."""
    words = f"algorithm.distillation={{teachers: {{default: one, other: two}}, estimator: {estimator}}}"
    pretended = run(SMALLEST, "8x80gb", monkeypatch, tmp_path, words)
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
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner, name, wrong, said = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((MrlError, Overcommit, ValueError, AssertionError), match=f"(?s){said}"):
        run(SMALLEST, "8x80gb", monkeypatch, tmp_path)


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


def test_vllm_gives_torchs_cache_back_before_it_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own allocator, whose calls of the device are recorded: only so has the KV cache what a weight sync staged."""
    allocator, done = CuMemAllocator.__new__(CuMemAllocator), []
    allocator.pointer_to_data = {
        number: AllocationData((0, size, number, 0), tag, is_asleep=True)
        for number, (tag, size) in enumerate([("weights", 3), ("kv_cache", 5)])
    }
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: done.append("give back"))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: done.append(handle[1]))
    allocator.wake_up(["weights"])
    allocator.wake_up(["kv_cache"])
    assert done == ["give back", 3, "give back", 5]
