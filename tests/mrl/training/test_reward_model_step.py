"""One step of a reward model is the same in every layout and for every microbatch size: scores, loss, metrics and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.algorithms.reward_model import RewardModelObjective
from mrl.config.sections.training import LayoutSection
from mrl.config.sections.tune import CenterSection, ObjectiveSection
from mrl.data.tune_rows import batch_of
from mrl.loops.tuning.row_logprobs import own_share, row_logprobs
from tests.mrl.training import scenarios
from tests.mrl.training.critics import set_head
from tests.mrl.training.layouts import name_of
from tests.mrl.training.pair_rows import scored_pairs, without_load
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

OBJECTIVES = (
    ObjectiveSection(name="reward_model"),
    ObjectiveSection(name="reward_model", smoothing=0.1, center=CenterSection(weight=0.01)),
    ObjectiveSection(
        name="reward_model", margin_scale=0.5, center=CenterSection(kind="batch_sum", weight=1e-3)
    ),
)


def reward_model_steps(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], microbatch_tokens: int
) -> list[dict[str, float]]:
    """Scores of all rows, then each objective's metrics and gradient norm, by weights that stay as they are."""
    at = scenarios.worker(
        rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens, value_head=True
    )
    set_head(at.policy)
    known = scored_pairs()
    found = row_logprobs(at, known, batch_rows=4)
    shard = own_share(batch_of(known, range(len(known))), at)
    told = [{f"{n}.{i}": value for n, values in found.items() for i, value in enumerate(values)}]
    counts = {
        "num_rows": sum(row.weight for row in known),
        "score_sum": sum(row.weight * sum(found[n]) for n, row in enumerate(known)),
    }
    for section in OBJECTIVES:
        metrics, _ = at.accumulate(shard, RewardModelObjective(section), counts)
        told.append(metrics | at.step(lr=0.0))
    return told


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = write_model(tmp_path_factory.mktemp("pairs") / "moe")
    return folder, run_ranks(reward_model_steps, 1, str(folder), {}, 4096)[0]


def test_scores_tell_responses_apart(one_rank: tuple[Path, list[dict[str, float]]]) -> None:
    """What is compared below is not all alike: the scores, and the gradients of the objectives."""
    scores, *steps = one_rank[1]
    assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
    assert len({round(step["grad_norm"], 3) for step in steps}) == len(OBJECTIVES)


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        ({}, 1),
        ({"ep": 2, "dp": 2}, 64),
        pytest.param({"tp": 2}, 64, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, 64, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, 64, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_a_step_of_a_reward_model_is_that_of_one_rank(
    layout: dict[str, int], tokens: int, one_rank: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, expected = one_rank
    world = LayoutSection(**layout).world_size
    for told in run_ranks(reward_model_steps, world, str(folder), layout, tokens):
        for ours, theirs in zip(told, expected, strict=True):
            ours, theirs = _without_norm(ours), _without_norm(theirs)
            assert ours[1] == pytest.approx(theirs[1], rel=5e-6)
            assert ours[0] == pytest.approx(theirs[0], rel=2e-6, abs=2e-6)


def _without_norm(metrics: dict[str, Any]) -> tuple[dict[str, Any], float]:
    rest = without_load(metrics)
    return rest, rest.pop("grad_norm", 0.0)
