"""The mismatch metrics count near-ties apart; their check stops a run whose engines serve other weights."""

import numpy as np
import pytest

from mrl.errors import WeightSyncError
from mrl.loops.mismatch import check_mismatch, measure_mismatch
from tests.support.samples import make_batch


def test_near_ties_are_counted_apart() -> None:
    batch = make_batch([(1, 3), (1, 2)])
    trainer = batch.arrays["rollout_logprobs"].copy()
    trainer[2] += 0.5
    trainer[5] -= 1e-3
    margins = np.full(batch.num_tokens, 1.0, np.float32)
    margins[2:4] = 1e-7
    measured = measure_mismatch(batch, trainer, margins, served=batch.loss_mask, margin=1e-5)
    assert measured["policy/rollout_logprob_near_ties"] == 2
    assert measured["policy/rollout_logprob_diff_max"] == pytest.approx(1e-3, rel=1e-3)
    assert measured["policy/rollout_logprob_near_tie_diff_max"] == pytest.approx(0.5, rel=1e-3)


def test_tokens_of_an_earlier_version_are_left_out() -> None:
    batch = make_batch([(1, 3), (1, 2)])
    trainer = batch.arrays["rollout_logprobs"] + np.float32(0.25)
    trainer[4:] += 1.0
    versions = np.array([0, 1, 1, 1, 0, 0, 0])
    measured = measure_mismatch(batch, trainer, None, served=versions == 1, margin=1e-5)
    assert measured["policy/rollout_logprob_diff_max"] == pytest.approx(0.25)
    assert measured["policy/rollout_logprob_diff_mean"] == pytest.approx(0.25)


def test_where_no_token_is_measured_no_difference_is_told() -> None:
    """A step of stale tokens, and one of near-ties: a 0 would claim that the engine agrees."""
    batch = make_batch([(1, 3), (1, 2)])
    trainer = batch.arrays["rollout_logprobs"] + np.float32(0.25)
    none, near = np.zeros(batch.num_tokens, bool), np.zeros(batch.num_tokens, np.float32)
    for measured, ties in (
        (measure_mismatch(batch, trainer, None, served=none, margin=1e-5), 0.0),
        (measure_mismatch(batch, trainer, near, served=~none, margin=1e-5), 5.0),
    ):
        assert not {name for name in measured if name.startswith("policy/rollout_logprob_diff_")}
        assert measured["policy/rollout_logprob_near_ties"] == ties
        check_mismatch(measured, 1e-4, version=3)


def test_a_long_batch_is_measured_piece_by_piece() -> None:
    """The metrics are those of all tokens at once; a later slice does not hide a NaN."""
    batch = make_batch([(1, 20_000)] * 4)
    trainer = batch.arrays["rollout_logprobs"] + np.linspace(-1, 1, batch.num_tokens, dtype=np.float32)
    margins = np.where(np.arange(batch.num_tokens) % 7, 1.0, 0.0).astype(np.float32)
    measured = measure_mismatch(batch, trainer, margins, served=batch.loss_mask, margin=1e-5)
    diff, near = np.abs(batch.arrays["rollout_logprobs"] - trainer), margins == 0
    clear = diff[batch.loss_mask & ~near]
    assert measured["policy/rollout_logprob_diff_max"] == clear.max()
    assert measured["policy/rollout_logprob_diff_mean"] == pytest.approx(clear.mean(dtype=np.float64))
    assert measured["policy/rollout_logprob_near_ties"] == (batch.loss_mask & near).sum()
    assert measured["policy/rollout_logprob_near_tie_diff_max"] == diff[batch.loss_mask & near].max()
    trainer[5] = np.nan
    assert np.isnan(
        measure_mismatch(batch, trainer, None, served=batch.loss_mask, margin=1e-5)[
            "policy/rollout_logprob_diff_max"
        ]
    )


@pytest.mark.parametrize("difference", [2e-4, float("nan")])
def test_the_check_names_the_version(difference: float) -> None:
    check_mismatch({"policy/rollout_logprob_diff_max": 1e-5}, 1e-4, version=3)
    with pytest.raises(WeightSyncError, match="version 3"):
        check_mismatch({"policy/rollout_logprob_diff_max": difference}, 1e-4, version=3)
