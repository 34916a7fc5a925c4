"""Drawn curves have a bounded length and show the same as all rows."""

import json

import numpy as np
import pytest

from mrl.observe.metric_curves import Curves, curve_points
from tests.support.run_folders import metrics_row


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_a_point_is_the_mean_and_the_range_of_its_rows(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    rows = [metrics_row(step, **{"policy/loss": float(value)}) for step, value in enumerate(values)]
    tree = curve_points(Curves(rows), points=8)
    width, line = tree["rows_per_point"], tree["metrics"]["policy/loss"]
    parts = [values[start : start + width] for start in range(0, count, width)]
    assert len(parts) == len(tree["step"]) <= 8 and tree["rows"] == count
    np.testing.assert_allclose(line["mean"], [part.mean() for part in parts], rtol=1e-5)
    if width > 1:
        np.testing.assert_allclose(line["low"], [part.min() for part in parts], rtol=1e-5)
        np.testing.assert_allclose(line["high"], [part.max() for part in parts], rtol=1e-5)
    assert tree["step"][-1] == count - 1 and tree["hours"][-1] == pytest.approx(count * 2 / 3600, rel=1e-5)


def test_numbers_that_are_not_finite_are_gaps_and_counted() -> None:
    values = [1.0, "nan", float("inf"), "-inf", 2.0, "no number", None, True]
    tree = curve_points(Curves({"step": step, "a": value} for step, value in enumerate(values)))
    assert tree["metrics"]["a"]["mean"] == [1.0, None, None, None, 2.0, None, None, None]
    assert tree["not_finite"] == {"a": (3, 1)}
    json.dumps(tree, allow_nan=False)


def test_rows_without_a_step_are_left_out_and_a_step_that_comes_again_replaces_the_first() -> None:
    rows = [
        {"step": 3, "a": 1},
        {"step": 3, "a": 2},
        {"a": 3},
        {"step": "4"},
        {"step": 10**30},
        {"step": 5, "a": 4},
    ]
    curves = Curves(rows)
    assert curves.skipped == 3 and curve_points(curves)["metrics"]["a"]["mean"] == [2.0, 4.0]
