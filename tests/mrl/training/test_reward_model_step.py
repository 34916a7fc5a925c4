"""One step of a reward model, of one head, of several, of a distribution or of steps, is the same in every layout and for every
microbatch size: scores, loss, metrics and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mrl.algorithms.process_reward_model import ProcessRewardObjective
from mrl.algorithms.reward_model import RewardModelObjective
from mrl.config.sections.training import LayoutSection
from mrl.config.sections.tune import CenterSection, DistributionSection, ObjectiveSection
from mrl.data.bootstrap import bootstrap_counts
from mrl.data.tune_rows import batch_of
from mrl.loops.tuning.row_logprobs import own_share, row_scores, row_step_scores
from mrl.reward_labels import DISTRIBUTION, STEP, reward_labels
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.mrl.training import scenarios
from tests.mrl.training.critics import head_weight, set_head
from tests.mrl.training.pair_rows import LAYOUTS, Steps, compare, scored_pairs, scored_steps, told_of
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

OBJECTIVES = (
    ObjectiveSection(name="reward_model"),
    ObjectiveSection(name="reward_model", smoothing=0.1, center=CenterSection(weight=0.01)),
    ObjectiveSection(name="reward_model", center=CenterSection(kind="batch_sum", weight=1e-3)),
)
DISTRIBUTIONS = (
    ObjectiveSection(name="reward_model", distribution=DistributionSection(prior=0.1)),
    ObjectiveSection(
        name="reward_model",
        smoothing=0.1,
        center=CenterSection(kind="batch_mean", weight=0.1),
        distribution=DistributionSection(),
    ),
)
KINDS = ((reward_labels(1), OBJECTIVES), (reward_labels(3), OBJECTIVES), (DISTRIBUTION, DISTRIBUTIONS))
"""What the model gives, and what it is trained by."""


def reward_model_steps(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], microbatch_tokens: int
) -> Steps:
    """Of each kind: scores of all rows, then each objective's metrics and gradient norm, by weights that stay as they are."""
    at = scenarios.worker(
        rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens, value_labels=reward_labels(1)
    )
    set_head(at.policy)
    told = steps_of(at, OBJECTIVES)
    place = {"layout": at.layout, "place": at.place, "device": at.device}
    for labels, objectives in KINDS[1:]:
        at.policy = TrainedModel(at.model, at.training, **place, value_labels=labels)
        at.policy.load_hf(folder)
        if labels == DISTRIBUTION:
            set_head(at.policy, head_weight(2))
        told += steps_of(at, objectives, heads=1 if labels == DISTRIBUTION else len(labels))
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


def steps_of(at: MegatronWorker, objectives: Sequence[ObjectiveSection], *, heads: int = 1) -> Steps:
    known = scored_pairs()
    found = row_scores(at, known, batch_rows=4)
    counts = bootstrap_counts(known, heads, seed=0) if heads > 1 else None
    shard = own_share(batch_of(known, range(len(known)), bootstrap=counts), at)
    told = [told_of(found)]
    denominators = {
        "num_rows": sum(row.weight for row in known),
        "score_sum": np.sum([row.weight * found[n].sum(0) for n, row in enumerate(known)], axis=0).tolist(),
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
    for labels, objectives in KINDS:
        scores, *steps = itertools.islice(remaining, 1 + len(objectives))
        assert len(scores) == 2 * len(scored_pairs()) * len(labels)
        assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
        assert len({round(step["grad_norm"], 3) for step in steps}) == len(objectives)
        assert all(("preference/disagreement" in step) == (len(labels) == 3) for step in steps)
        assert all(("preference/sigma" in step) == (labels == DISTRIBUTION) for step in steps)
    scores, *steps = remaining
    assert list(scores) == [
        f"{n}.{i}" for n, row in enumerate(scored_steps()) for i in range(len(row.step_labels))
    ]
    assert len({round(score, 3) for score in scores.values()}) > len(scores) / 2
    assert len(steps) == 2 and steps[0]["process/step_loss"] != steps[1]["process/step_loss"]
    assert all(step["grad_norm"] > 0.01 for step in steps)


@LAYOUTS
def test_a_step_of_a_reward_model_is_that_of_one_rank(layout, tokens, one_rank) -> None:
    folder, expected = one_rank
    for told in run_ranks(
        reward_model_steps, LayoutSection(**layout).world_size, str(folder), layout, tokens
    ):
        compare(told, expected)
