"""A step over pairs has the same loss, metrics and gradient for every layout and microbatch size."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.algorithms.preference import PreferenceObjective
from mrl.config.sections.training import LayoutSection
from mrl.config.sections.tune import ObjectiveSection
from mrl.data.tune_rows import build_tune_batch
from mrl.loops.tuning.row_logprobs import own_share, row_logprobs
from tests.mrl.training import scenarios
from tests.mrl.training.pair_rows import LAYOUTS, LONG_LAYOUTS, Steps, compare, name, pairs, told_of
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

OBJECTIVES = (
    ObjectiveSection(name="dpo", sft_weight=0.5, smoothing=0.1),
    ObjectiveSection(name="ipo", length="mean"),
    ObjectiveSection(name="simpo", beta=2.0),
    ObjectiveSection(name="orpo"),
)


def preference_steps(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], microbatch_tokens: int
) -> Steps:
    """Return all rows' log-probs, then each objective's metrics and gradient norm at fixed weights."""
    at = scenarios.worker(rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens)
    rows = pairs()
    logprobs = row_logprobs(at, rows, batch_rows=4)
    # No two margins are equal: in a tie, rounding alone would pick the correct side.
    reference = {n: [x - 0.3137 + 0.2 * i for i, x in enumerate(values)] for n, values in logprobs.items()}
    shard = own_share(build_tune_batch(rows, range(len(rows)), reference), at)
    steps = [told_of(logprobs)]
    for section in OBJECTIVES:
        counts = {"num_rows": float(len(rows))}
        metrics, _ = at.accumulate(shard, PreferenceObjective(section), counts)
        steps.append(metrics | at.step(lr=0.0))
    return steps


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    folder = write_model(tmp_path_factory.mktemp("pairs") / "moe")
    return folder, run_ranks(preference_steps, 1, str(folder), {}, 4096)[0]


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_LAYOUTS)],
    ids=name,
)
def test_a_step_over_pairs_is_that_of_one_rank(layout, tokens, one_rank) -> None:
    folder, expected = one_rank
    for steps in run_ranks(preference_steps, LayoutSection(**layout).world_size, str(folder), layout, tokens):
        compare(steps, expected)
