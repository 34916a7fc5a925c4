"""A reward model's step has the same scores, loss and gradient for every layout and microbatch size."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.algorithms.reward_model_objective import RewardModelObjective
from mrl.config.sections.training import LayoutSection
from mrl.config.sections.tune import CenterSection, ObjectiveSection
from mrl.data.tune_rows import build_tune_batch
from mrl.loops.tuning.row_logprobs import own_share, row_scores
from tests.mrl.training import scenarios
from tests.mrl.training.critics import set_head
from tests.mrl.training.pair_rows import LAYOUTS, LONG_LAYOUTS, Steps, compare, name, scored_pairs, told_of
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

OBJECTIVES = (
    ObjectiveSection(name="reward_model"),
    ObjectiveSection(name="reward_model", smoothing=0.1, center=CenterSection(weight=0.01)),
    ObjectiveSection(name="reward_model", center=CenterSection(kind="batch_sum", weight=1e-3)),
)


def reward_model_steps(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], microbatch_tokens: int
) -> Steps:
    """Return all rows' scores, then each objective's metrics and gradient norm at fixed weights."""
    at = scenarios.worker(
        rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens, has_value_head=True
    )
    set_head(at.policy)
    known = scored_pairs()
    scored = row_scores(at, known, batch_rows=4)
    shard = own_share(build_tune_batch(known, range(len(known))), at)
    steps = [told_of(scored)]
    denominators = {
        "num_rows": float(len(known)),
        "score_sum": float(sum(scores.sum() for scores in scored.values())),
    }
    for section in OBJECTIVES:
        metrics, _ = at.accumulate(shard, RewardModelObjective(section), denominators)
        steps.append(metrics | at.step(lr=0.0))
    return steps


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    folder = write_model(tmp_path_factory.mktemp("pairs") / "moe")
    return folder, run_ranks(reward_model_steps, 1, str(folder), {}, 4096)[0]


def test_scores_tell_responses_apart(one_rank: tuple[Path, Steps]) -> None:
    """Check that the scores, and the objectives' gradients, differ from each other."""
    scores, *steps = one_rank[1]
    assert len(scores) == 2 * len(scored_pairs())
    assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
    assert len({round(step["grad_norm"], 3) for step in steps}) == len(OBJECTIVES)


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_LAYOUTS)],
    ids=name,
)
def test_a_step_of_a_reward_model_is_that_of_one_rank(layout, tokens, one_rank) -> None:
    folder, expected = one_rank
    for run in run_ranks(reward_model_steps, LayoutSection(**layout).world_size, str(folder), layout, tokens):
        compare(run, expected)
