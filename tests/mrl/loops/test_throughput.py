"""Tokens and operations per second of steps with known amounts."""

import numpy as np
import pytest

from mrl.config.sections.algorithm import AlgorithmSection
from mrl.loops.throughput import Throughput, peak_flops
from mrl.models.facts import ModelSize

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
FACTS = ModelSize(QWEN, "test")
LENGTHS = np.array([10, 30])
TIMES = {"time/step_seconds": 8.0, "time/update_seconds": 2.0, "optim/grad_norm": 1.0}
FORWARD = FACTS.forward_flops(40, 500)


def test_a_step_is_one_forward_pass_for_its_samples_and_three_for_its_update() -> None:
    metrics = Throughput(FACTS, AlgorithmSection(), num_devices=4, num_trainers=3, peak_flops=1e6)(
        LENGTHS, TIMES
    )
    assert metrics == {
        "perf/tokens_per_second_per_device": 40 / 8 / 4,
        "perf/step_flops_per_second_per_device": 4 * FORWARD / 8 / 4,
        "perf/step_mfu": 4 * FORWARD / 8 / 4 / 1e6,
        "perf/update_flops_per_second_per_device": 3 * FORWARD / 2 / 3,
        "perf/update_mfu": 3 * FORWARD / 2 / 3 / 1e6,
    }


def test_reference_critic_and_epochs_count() -> None:
    algorithm = AlgorithmSection.model_validate(
        {
            "estimator": {"name": "gae"},
            "epochs": 2,
            "kl": {"location": "reward", "kind": "k1", "coefficient": 0.1},
        }
    )
    headless = FACTS.forward_flops(40, 500, has_head=False)
    assert FORWARD - headless == 2 * 100 * 8 * 40
    measure = Throughput(FACTS, algorithm, num_devices=1, num_trainers=1, peak_flops=None)
    both = measure(LENGTHS, TIMES | {"critic/grad_norm": 1.0})
    assert (
        both["perf/step_flops_per_second_per_device"]
        == (2 * FORWARD + headless + 6 * (FORWARD + headless)) / 8
    )
    critic_alone = {n: v for n, v in TIMES.items() if n != "optim/grad_norm"} | {"critic/grad_norm": 1.0}
    assert measure(LENGTHS, critic_alone)["perf/update_flops_per_second_per_device"] == 6 * headless / 2


def test_an_only_update_has_the_references_pass_in_it() -> None:
    """Its time includes both, so the rate counts both; with several updates the pass comes before them."""
    kl = {"kl": {"location": "loss", "kind": "k3", "coefficient": 0.1}}
    for algorithm, passes in ((kl, 4), (kl | {"minibatches": 2}, 3)):
        metrics = Throughput(FACTS, AlgorithmSection.model_validate(algorithm), 1, 1, None)(LENGTHS, TIMES)
        assert metrics["perf/update_flops_per_second_per_device"] == passes * FORWARD / 2
        assert metrics["perf/step_flops_per_second_per_device"] == 5 * FORWARD / 8


def test_no_utilisation_is_told_of_an_unknown_device() -> None:
    assert peak_flops("cpu", "bfloat16") is None and peak_flops("NVIDIA H100 PCIe", "float32") is None
    metrics = Throughput(FACTS, AlgorithmSection(), num_devices=1, num_trainers=1, peak_flops=None)(
        LENGTHS, TIMES
    )
    assert not any(name.endswith("mfu") for name in metrics)


def test_a_step_without_samples_has_no_tokens() -> None:
    empty = {"time/step_seconds": 8.0}
    metrics = Throughput(FACTS, AlgorithmSection(), num_devices=1, num_trainers=1, peak_flops=1e6)(
        np.zeros(0, np.int64), empty
    )
    assert metrics["perf/tokens_per_second_per_device"] == metrics["perf/step_mfu"] == 0.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 NVL", 8.35e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA H20", 1.48e14),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_known_by_cudas_names(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bfloat16") == peak
