"""One step of a reward model, of one score or of steps, is the same in every layout and for every
microbatch size: scores, loss, metrics and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.algorithms.reward_model_objective import ProcessRewardObjective, RewardModelObjective
from mrl.config.sections.training import LayoutSection
from mrl.config.sections.tune import CenterSection, ObjectiveSection
from mrl.data.tune_rows import batch_of
from mrl.loops.tuning.row_logprobs import own_share, row_scores, row_step_scores
from mrl.reward_labels import SCORE, STEP
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.mrl.training import scenarios
from tests.mrl.training.critics import set_head
from tests.mrl.training.pair_rows import (
    LAYOUTS,
    LONG_LAYOUTS,
    Steps,
    compare,
    name,
    scored_pairs,
    scored_steps,
    told_of,
)
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
    """Of each kind: scores of all rows, then each objective's metrics and gradient norm, by weights that stay as they are."""
    at = scenarios.worker(
        rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens, value_labels=SCORE
    )
    set_head(at.policy)
    told = steps_of(at, OBJECTIVES)
    place = {"layout": at.layout, "place": at.place, "device": at.device}
    at.policy = TrainedModel(at.model, at.training, **place, value_labels=STEP)
    at.policy.load_hf(folder)
    set_head(at.policy)
    return told + process_steps_of(at)


def process_steps_of(at: MegatronWorker) -> Steps:
    """The same of judged steps."""
    known = scored_steps()
    told = [told_of(row_step_scores(at, known, batch_rows=4))]
    whole = batch_of(known, range(len(known)))
    shard, denominators = own_share(whole, at), {"num_tokens": float(whole.loss_mask.sum())}
    for smoothing in (0.0, 0.1):
        section = ObjectiveSection(name="process_reward_model", smoothing=smoothing)
        metrics, _ = at.accumulate(shard, ProcessRewardObjective(section), denominators)
        told.append(metrics | at.step(lr=0.0))
    return told


def steps_of(at: MegatronWorker, objectives: Sequence[ObjectiveSection]) -> Steps:
    known = scored_pairs()
    found = row_scores(at, known, batch_rows=4)
    shard = own_share(batch_of(known, range(len(known))), at)
    told = [told_of(found)]
    denominators = {
        "num_rows": float(len(known)),
        "score_sum": float(sum(scores.sum() for scores in found.values())),
    }
    for section in objectives:
        metrics, _ = at.accumulate(shard, RewardModelObjective(section), denominators)
        told.append(metrics | at.step(lr=0.0))
    return told


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    folder = write_model(tmp_path_factory.mktemp("pairs") / "moe")
    return folder, run_ranks(reward_model_steps, 1, str(folder), {}, 4096)[0]


def test_scores_tell_responses_apart(one_rank: tuple[Path, Steps]) -> None:
    """What is compared below is not all alike: the scores, and the gradients of the objectives."""
    told = one_rank[1]
    remaining = iter(told)
    scores, *steps = itertools.islice(remaining, 1 + len(OBJECTIVES))
    assert len(scores) == 2 * len(scored_pairs())
    assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
    assert len({round(step["grad_norm"], 3) for step in steps}) == len(OBJECTIVES)
    scores, *steps = remaining
    assert list(scores) == [
        f"{n}.{i}" for n, row in enumerate(scored_steps()) for i in range(len(row.step_labels))
    ]
    assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
    assert len(steps) == 2 and steps[0]["process/step_loss"] != steps[1]["process/step_loss"]
    assert all(step["grad_norm"] > 0.01 for step in steps)


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG_LAYOUTS)],
    ids=name,
)
def test_a_step_of_a_reward_model_is_that_of_one_rank(layout, tokens, one_rank) -> None:
    folder, expected = one_rank
    for told in run_ranks(
        reward_model_steps, LayoutSection(**layout).world_size, str(folder), layout, tokens
    ):
        compare(told, expected)
