"""Curves keep their length bounded, and say the same as all rows."""

import json
import tracemalloc

import numpy as np
import pytest

from mrl.report.curves import DownsampledCurves
from tests.support.run_folders import metrics_row


def curves_of(rows, points: int) -> DownsampledCurves:
    curves = DownsampledCurves(points)
    for row in rows:
        curves.add(row)
    return curves


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_a_point_is_the_mean_and_the_range_of_its_rows(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    rows = [metrics_row(step, **{"policy/loss": float(value)}) for step, value in enumerate(values)]
    tree = curves_of(rows, points=8).tree()
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
    curves = curves_of(({"step": step, "a": value} for step, value in enumerate(values)), points=8)
    tree = curves.tree()
    assert tree["metrics"]["a"]["mean"] == [1.0, None, None, None, 2.0, None, None, None]
    assert tree["not_finite"] == {"a": [3, 1]}
    json.dumps(tree, allow_nan=False)


def test_rows_without_a_step_or_with_an_earlier_one_are_left_out() -> None:
    rows = [
        {"step": 3, "a": 1},
        {"step": 3, "a": 2},
        {"a": 3},
        {"step": "4"},
        {"step": 10**30},
        {"step": 5, "a": 4},
    ]
    curves = curves_of(rows, points=8)
    assert curves.skipped == 4 and curves.tree()["metrics"]["a"]["mean"] == [1.0, 4.0]


def test_memory_does_not_grow_with_the_rows() -> None:
    """Of the peak over 200 rows, 2000 need nothing more."""
    peaks = []
    for count in (200, 2000):
        tracemalloc.start()
        curves_of(({"step": step, **{f"m/{n}": 1.0 for n in range(20)}} for step in range(count)), points=100)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
