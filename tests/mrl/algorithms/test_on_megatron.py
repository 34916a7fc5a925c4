"""Every loss, aggregation, KL and correction name through a real Megatron update, equal on every layout.

Bound: float32 loss, gradient norm and metrics match one rank and microbatch to 2e-4, relative or absolute.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections import algorithm, correction, policy_loss
from mrl.config.sections.lora import LoraSection
from mrl.config.sections.training import LayoutSection
from mrl.samples import TrainBatch
from tests.mrl.algorithms import megatron_scenarios as scenarios
from tests.mrl.algorithms.padded import bounds_of
from tests.mrl.training.scenarios import TEMPERATURE
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.integration

SPECIAL: dict[str, dict[str, Any]] = {
    "custom": {"function": "tests.mrl.algorithms.megatron_scenarios:pulled", "options": {"tau": 0.5}},
    "dppo_tv": {"low": 0.002, "high": 0.002},
}
"""Options where the defaults would not show on ratios near 1."""


def loss_of(name: str) -> dict[str, Any]:
    return {"name": name} | SPECIAL.get(name, {})


def mode_of(name: str) -> dict[str, Any]:
    return {"mode": name, "length": 12} if name == "constant" else {"mode": name}


def kl_of(kind: str) -> dict[str, Any]:
    return {"location": "loss", "kind": kind, "coefficient": 0.5, "unbiased": kind == "k1"}


def correction_of(kind: str) -> dict[str, Any]:
    return {"kind": kind} | bounds_of(kind, low=0.95, high=1.1)


CONFIGS: list[dict[str, Any]] = [
    *({"loss": loss_of(n)} | scenarios.EXTRAS for n in policy_loss.LOSS_NAMES),
    *({"aggregation": mode_of(n)} | scenarios.EXTRAS for n in typing.get_args(algorithm._Aggregations)),
    *({"kl": kl_of(n)} for n in typing.get_args(algorithm._KlKinds)),
    *({"correction": correction_of(n)} for n in typing.get_args(correction.CORRECTION_KINDS)),
    {"old_logprobs": "rollout"},
    {"loss": {"name": "ppo_clip", "dual_clip": 1.05}} | scenarios.EXTRAS,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def batch(folder: Path) -> TrainBatch:
    """Old, engine and reference log-probs near the model's, so that ratios are near 1; a third are stale."""
    plain = random_batch(10, seed=5)
    logprobs, _ = reference_logprobs(folder, plain, temperature=TEMPERATURE)
    noise = np.random.default_rng(1).normal(size=(3, plain.num_tokens)).astype(np.float32)
    near = {n: (logprobs + s * noise[i]).astype(np.float32) for i, (n, s) in enumerate(NOISE.items())}
    signs = np.repeat(np.arange(10) % 2, plain.lengths()).astype(np.float32)
    ages = np.repeat(np.arange(10) % 3 == 1, plain.lengths()).astype(np.float32)
    return plain.with_arrays(scores=signs, age=ages, **near)


NOISE = {"old_logprobs": 0.2, "rollout_logprobs": 0.3, "ref_logprobs": 0.4}


def run(
    folder: Path,
    layout: dict[str, int],
    batch: TrainBatch,
    microbatch_tokens: int = 40,
    recompute: str = "off",
) -> list[dict[str, Any]]:
    world = LayoutSection(**layout).world_size
    arguments = (str(folder), layout, batch, CONFIGS, microbatch_tokens, recompute)
    return run_ranks(scenarios.update_with_each, world, *arguments, seconds=280)


@pytest.fixture(scope="module")
def one(folder: Path, batch: TrainBatch) -> list[dict[str, float]]:
    result = run(folder, {}, batch, 4096)[0]
    assert result["moved"]
    return result["metrics"]


def check(results: list[dict[str, Any]], one: list[dict[str, float]]) -> None:
    for result in results:
        assert result["moved"]
        for config, ours, wanted in zip(CONFIGS, result["metrics"], one, strict=True):
            gaps = {n: (ours[n], wanted[n]) for n in wanted if ours[n] != pytest.approx(wanted[n], **BOUND)}
            gaps.pop("optimizer_steps", None)
            assert not gaps, f"{config}: {gaps}"


BOUND = {"rel": 2e-4, "abs": 2e-4}


def test_each_configuration_has_its_own_gradient(one) -> None:
    losses = dict(zip(policy_loss.LOSS_NAMES, one, strict=False))
    assert len({round(metrics["grad_norm"], 6) for metrics in losses.values()}) == len(losses)
    assert all(metrics["grad_norm"] > 1e-3 and metrics["skipped"] == 0 for metrics in one)


LAYOUTS: list[tuple[dict[str, int], str]] = [
    ({"ep": 2, "dp": 2}, "selective"),
    ({"tp": 2, "ep": 2}, "off"),
    ({"pp": 2}, "full"),
]
LONG_LAYOUTS: list[tuple[dict[str, int], str]] = [({"dp": 4}, "off"), ({"cp": 2, "pp": 2, "vpp": 2}, "full")]
"""Layouts and their recomputation, in which routers choose twice but must count once."""


@pytest.fixture(
    scope="module",
    params=[*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LONG_LAYOUTS)],
    ids=str,
)
def many(request: pytest.FixtureRequest, folder: Path, batch: TrainBatch) -> list[dict[str, Any]]:
    layout, recompute = request.param
    return run(folder, layout, batch, recompute=recompute)


def test_layouts_and_microbatches_change_nothing(many, one) -> None:
    check(many, one)


def test_the_one_update_of_a_step_needs_no_pass_before_it(many) -> None:
    """It matches an update with a pass for old log-probs to 1e-5; configurations differ by 1e-2 and more."""
    for result in many:
        for tree, differences in zip(scenarios.WITHOUT_A_PASS, result["differences"], strict=True):
            at = {key: differences.pop(key) for key in ("margins_at", "mismatch_at") if key in differences}
            assert all(difference < 1e-5 for difference in differences.values()), (tree, differences)
            if at or result is many[0]:  # a place without tokens has none; the first has the most
                assert 0 < at["margins_at"] < 1 and at["mismatch_at"] > 0.1


BESIDE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"ep": 2, "dp": 2}, {}),
    ({"pp": 2}, {}),
    ({"tp": 2, "ep": 2}, {"lora": LoraSection(rank=4)}),
]
LONG_BESIDE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"cp": 2, "pp": 2, "vpp": 2}, {"recompute": "full"}),
    ({"pp": 2}, {"lora": LoraSection(rank=4)}),
]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [*BESIDE, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_BESIDE)],
    ids=str,
)
def test_the_reference_beside_the_policy(layout, changes, folder) -> None:
    """It equals a separate reference pass bitwise; the gradient that follows, of other rows, to rounding."""
    world, batch = LayoutSection(**layout).world_size, random_batch(10, seed=5)
    results = run_ranks(scenarios.reference_beside, world, str(folder), layout, batch, changes)
    assert any(result["arrays"] is not None for result in results)
    for result in results:
        apart, beside = result["metrics"]
        assert (
            result["same"]
            and beside == pytest.approx(apart, rel=1e-5)
            and apart["policy/kl_reference"] > 1e-3
        )
        wanted, gradient = result["gradients"]
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
        separate, plain, both = result["forward"]
        if both is None:
            assert separate is plain is result["arrays"] is None
            continue
        np.testing.assert_array_equal(both["ref_logprobs"], separate["logprobs"])
        np.testing.assert_array_equal(both["logprobs"], plain["logprobs"])
        assert np.abs(both["ref_logprobs"] - both["logprobs"]).max() > 1e-2
        logprobs = result["arrays"]["ref_logprobs"]
        np.testing.assert_allclose(logprobs, np.where(logprobs == 0, 0, separate["logprobs"]), atol=1e-5)
        assert np.count_nonzero(logprobs) == np.count_nonzero(result["arrays"]["logprobs"]) > 0


def test_no_stage_waits_between_reference_and_policy(folder: Path, tmp_path: Path) -> None:
    """The pipeline is not drained: the first stage starts the policy while the last is in the reference."""
    batch = random_batch(10, seed=5)
    counts = run_ranks(scenarios.undrained, 2, str(folder), {"pp": 2}, batch, str(tmp_path / "begun"))
    assert counts[0] == counts[1] and counts[0] % 2 == 0 and counts[0] > 2
