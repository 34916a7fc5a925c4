"""Bytes of checkpoints and exports, and the host memory of a node that saves."""

import pytest

from mrl.capacity.advice import advise
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.config.load import load
from mrl.files import CONFIGS

QWEN = 30_532_122_624
"""Parameters of Qwen3-30B-A3B."""


def estimate(*words: str, recipe: str = "qwen3_30b_a3b") -> Estimate:
    return Estimate(load([CONFIGS / f"{recipe}.yaml"], words), load_hardware("8x80gb"))


def test_a_checkpoint_is_fourteen_bytes_a_parameter_and_an_export_two() -> None:
    plan = estimate()
    assert plan.saving.num_bytes == 14 * QWEN
    assert plan.saving.node_bytes == 14 * QWEN
    assert plan.exporting.num_bytes == 2 * QWEN
    assert plan.exporting.host_bytes == 5_000_000_000
    turned = (
        128 * 2880 * 5760
    )  # a layer's gate and up projections, which gpt-oss's folder has the other way round
    assert estimate(recipe="gpt_oss_120b").exporting.host_bytes == 5_000_000_000 + 2 * turned
    rate = plan.hardware.storage_bytes_per_second
    assert plan.saving.seconds == 14 * QWEN / rate
    assert plan.exporting.seconds == 2 * 2 * QWEN / rate
    assert estimate("training.dtype=float32").saving.num_bytes == 16 * QWEN


def test_a_critic_is_saved_too() -> None:
    words = ["algorithm.estimator.name=gae", "critic.optimizer.lr=1e-5", "training.layout.dp=4"]
    assert estimate(*words).saving.num_bytes == 28 * QWEN


WIDE = "training.optimizer.moments_dtype=float32"
BESIDE = "loop.checkpoint.async_save=true"


def test_a_save_beside_training_copies_what_a_node_writes() -> None:
    """One node, no replica of an expert: the whole checkpoint; without overlap only a tensor."""
    assert estimate(WIDE).saving.host_bytes == 0
    plan = estimate(WIDE, BESIDE)
    assert plan.saving.host_bytes == plan.saving.node_bytes == 14 * QWEN
    save = next(moment for moment in plan.host if moment.name == "save")
    assert save.parts["copied state"] == plan.saving.host_bytes
    assert save.parts.keys() == {"off-loaded", "object store", "copied state"}
    assert save.total == sum(save.parts.values())


def test_narrow_moments_are_copied_as_float32() -> None:
    plan = estimate("training.optimizer.moments_dtype=bfloat16")
    held = plan.stages[0].policy.parameters
    assert plan.saving.host_bytes == 8 * held * 12


def test_a_node_that_cannot_copy_is_an_error_that_names_the_moment() -> None:
    """The off-loaded state fits by itself, but not with the copies of a save during training."""
    hardware = load_hardware("8x80gb")
    kept = next(m for m in estimate(WIDE).host if m.name == "engines serve").total
    small = hardware.model_copy(update={"host_memory_bytes": kept + 100_000_000_000})
    reports = [
        advise(Estimate(load([CONFIGS / "qwen3_30b_a3b.yaml"], words), small)).errors
        for words in ([WIDE], [WIDE, BESIDE])
    ]
    assert reports[0] == [] and [line.partition(" needs")[0] for line in reports[1]] == ["'save'"]


@pytest.mark.parametrize("every", [0, 10])
def test_an_export_beside_the_run_takes_host_memory(every: int) -> None:
    plan = estimate("loop.checkpoint.every_steps=10", f"export.every_steps={every}")
    assert all(("export" in moment.parts) == bool(every) for moment in plan.host)
