"""Passes over sampling masks, in every kind of layout: log-probs and entropy against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.training import LayoutSection
from mrl.samples import TrainBatch
from mrl.sampling_masks import SamplingMasks
from mrl.training.pass_options import PassOptions
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import name_of
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.integration


def truncated_batch() -> TrainBatch:
    """Return a batch whose tokens, but one in six, were drawn from a fifth of the vocabulary or less."""
    rng, batch = np.random.default_rng(5), random_batch(10, seed=1)
    kept = []
    for token in batch.tokens.tolist():
        others = rng.choice(VOCAB, rng.integers(1, VOCAB // 5), replace=False).tolist()
        kept.append([] if rng.random() < 1 / 6 else sorted({token, *others}))
    return dataclasses.replace(batch, sampling_masks=SamplingMasks.of(kept))


def passes(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> dict[str, Any]:
    at = scenarios.worker(rank, world, port, folder, layout)
    batch = truncated_batch()
    mine, shard = scenarios.shard_of(batch, at)
    options = PassOptions(temperature=scenarios.TEMPERATURE)
    arrays = at.forward(shard, options)
    count = {"num_tokens": float(batch.loss_mask.sum())}
    return {"samples": mine, "arrays": arrays, "metrics": at.update(shard, cross_entropy, count, options)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Return a folder, and the metrics of one rank, checked against transformers' loss."""
    folder = write_model(tmp_path_factory.mktemp("model") / "moe")
    (result,) = run_ranks(passes, 1, str(folder), {})
    check_arrays([result], folder)
    batch = truncated_batch()
    logprobs, _ = reference_logprobs(folder, batch, temperature=scenarios.TEMPERATURE)
    assert result["metrics"]["loss"] == pytest.approx(-logprobs[batch.loss_mask].mean(), rel=1e-5)
    return folder, result["metrics"]


def check_arrays(results: list[dict[str, Any]], folder: Path) -> None:
    batch = truncated_batch()
    logprobs, entropy = reference_logprobs(folder, batch, temperature=scenarios.TEMPERATURE)
    outputs = [result for result in results if result["arrays"] is not None]
    assert sorted(np.concatenate([r["samples"] for r in outputs]).tolist()) == list(range(10))
    for result in outputs:
        index = batch.positions(result["samples"])
        np.testing.assert_allclose(result["arrays"]["logprobs"], logprobs[index], atol=1e-5)
        np.testing.assert_allclose(result["arrays"]["entropy"], entropy[index], atol=1e-5)


def test_one_rank(expected: tuple[Path, dict[str, float]]) -> None:
    whole = dataclasses.replace(truncated_batch(), sampling_masks=None)
    folder, _ = expected
    ours, theirs = (
        reference_logprobs(folder, batch, temperature=scenarios.TEMPERATURE)[0]
        for batch in (truncated_batch(), whole)
    )
    assert (ours - theirs).mean() > 0.5, "masks must matter"


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"cp": 2},
        pytest.param({"tp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"ep": 2, "dp": 2}, marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_layouts(layout: dict[str, int], expected: tuple[Path, dict[str, float]]) -> None:
    folder, metrics = expected
    results = run_ranks(passes, LayoutSection(**layout).world_size, str(folder), layout)
    check_arrays(results, folder)
    for result in results:
        for name in ("loss", "entropy", "grad_norm"):
            assert result["metrics"][name] == pytest.approx(metrics[name], rel=5e-6)
