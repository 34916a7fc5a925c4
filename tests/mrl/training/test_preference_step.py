"""One step over pairs is the same in every layout and for every microbatch size: loss, metrics and gradient."""

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
    """Log-probs of all rows, then each objective's metrics and gradient norm, by weights that stay as they are."""
    at = scenarios.worker(rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens)
    rows = pairs()
    found = row_logprobs(at, rows, batch_rows=4)
    # No two margins are equal: rounding alone would say which side of a tie is right.
    reference = {
        n: [value - 0.3137 + 0.2 * i for i, value in enumerate(values)] for n, values in found.items()
    }
    shard = own_share(build_tune_batch(rows, range(len(rows)), reference), at)
    told = [told_of(found)]
    for section in OBJECTIVES:
        counts = {"num_rows": float(len(rows))}
        metrics, _ = at.accumulate(shard, PreferenceObjective(section), counts)
        told.append(metrics | at.step(lr=0.0))
    return told


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    folder = write_model(tmp_path_factory.mktemp("pairs") / "moe")
    return folder, run_ranks(preference_steps, 1, str(folder), {}, 4096)[0]


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG_LAYOUTS)],
    ids=name,
)
def test_a_step_over_pairs_is_that_of_one_rank(layout, tokens, one_rank) -> None:
    folder, expected = one_rank
    for told in run_ranks(preference_steps, LayoutSection(**layout).world_size, str(folder), layout, tokens):
        compare(told, expected)
