"""Edge-case batches on a real worker: one-token prompts and responses, no signal, bad numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mrl.algorithms.objective import Objective
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.errors import NumericError
from mrl.loops.nan_guard import check_update
from mrl.samples import TrainBatch
from tests.mrl.training.scenarios import digest_parameters, shard_of, worker
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, reference_logprobs, write_model

pytestmark = pytest.mark.integration


def shortest(num_samples: int = 6) -> TrainBatch:
    """Return one-token prompts and responses with advantages of 0."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, 2 * num_samples)
    return TrainBatch(
        tokens=tokens,
        cu_seqlens=np.arange(0, 2 * num_samples + 1, 2, dtype=np.int32),
        loss_mask=np.tile([False, True], num_samples),
        group_ids=np.arange(num_samples) // 2,
        sample_ids=tuple(f"{i // 2}.{i % 2}" for i in range(num_samples)),
        arrays={"advantages": np.zeros(2 * num_samples, np.float32)},
    )


def at_the_edge(rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    """Compute log-probs; update without signal; update with an infinite loss on one rank."""
    at = worker(rank, world, port, folder, {"ep": 2, "dp": 2})
    mine, shard = shard_of(shortest(), at)
    arrays = at.forward(shard)
    objective, count = Objective(AlgorithmSection()), {"num_tokens": 6.0, "num_sequences": 6.0}
    flat = at.update(shard, objective, count)

    def bad(**given: Any) -> Any:
        loss, metrics = objective(**given)
        return (loss * float("inf") if rank == 1 else loss), metrics

    signal = dataclasses.replace(shard, arrays={"advantages": np.ones_like(shard.arrays["advantages"])})
    before = digest_parameters(at.policy)
    poisoned = at.update(signal, bad, count)
    return {
        "samples": mine,
        "arrays": arrays,
        "flat": flat,
        "poisoned": poisoned,
        "harmed": before != digest_parameters(at.policy),
        "good": at.update(signal, objective, count),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = write_model(tmp_path_factory.mktemp("model") / "moe")
    logprobs, _ = reference_logprobs(folder, shortest(), temperature=1.0)
    return [r | {"expected": logprobs} for r in run_ranks(at_the_edge, 2, str(folder))]


def test_one_token_prompts_have_the_log_probs_of_transformers(results: list[dict[str, Any]]) -> None:
    for result in results:
        index = (2 * result["samples"][:, None] + [0, 1]).ravel()
        np.testing.assert_allclose(result["arrays"]["logprobs"], result["expected"][index], atol=1e-5)
        assert (result["arrays"]["logprobs"][1::2] < 0).all()


def test_advantages_of_0_are_a_step_of_gradient_0(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert (result["flat"]["skipped"], result["flat"]["grad_norm"], result["flat"]["loss"]) == (0, 0, 0)


def test_infinity_on_one_rank_stops_all_before_parameters_change(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["poisoned"]["skipped"] == 1 and not result["harmed"]
        with pytest.raises(NumericError, match=r"0\.0, 0\.1"):
            check_update(shortest(), result["poisoned"], "policy")
        assert result["good"]["skipped"] == 0 and result["good"]["grad_norm"] > 0
