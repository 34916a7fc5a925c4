"""What a validation says of a process reward model."""

from __future__ import annotations

import numpy as np
import pytest

from mrl.config.sections.tune import ObjectiveSection
from mrl.data.conversation import Encoded
from mrl.data.tune_rows import TuneRow
from mrl.loops.tuning.step_figures import step_figures, step_line, step_report
from mrl.observe.metric_names import undescribed

SECTION = ObjectiveSection(name="process_reward_model")
CASES = (
    ("a", (1.0, 1.0, 0.0, 0.0), (2.0, 1.0, -1.0, 3.0)),  # the first error is found
    ("a", (1.0, 0.0), (-1.0, -2.0)),  # one is seen too early
    ("a", (0.0, 0.0), (1.0, -1.0)),  # one is seen too late
    ("b", (1.0, 0.9), (3.0, 0.1)),  # right, and passed
    ("b", (1.0, 1.0), (3.0, -0.1)),  # right, and not passed
)
"""Tag, labels and scores of judged steps."""


def rows_of(cases: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...]) -> list[TuneRow]:
    response = Encoded(np.arange(6), np.ones(6, bool), 1)
    return [
        TuneRow(str(n), (response,), (True,), tag=tag, step_labels=labels)
        for n, (tag, labels, _) in enumerate(cases)
    ]


SCORES = {n: np.array(scores) for n, (_, _, scores) in enumerate(CASES)}


def test_the_first_error_is_found_where_the_first_low_score_is() -> None:
    found = step_figures(SECTION, rows_of(CASES), SCORES)
    assert not undescribed(found) and found["val/rows"] == 5 and found["val/steps"] == 12
    assert found["val/process/found_error"] == pytest.approx(1 / 3)
    assert found["val/process/passed_right"] == 0.5
    assert found["val/process/f1"] == pytest.approx(2 * (1 / 3) * 0.5 / (1 / 3 + 0.5))
    assert found["val/process/accuracy"] == pytest.approx((3 + 1 + 1 + 1.9 + 1) / 12)
    assert found["val/process/found_error/a"] == pytest.approx(1 / 3)
    assert found["val/process/passed_right/b"] == 0.5
    assert "val/process/passed_right/a" not in found and "val/process/f1/b" not in found
    flat = np.concatenate(list(SCORES.values()))
    labels = np.array([label for _, each, _ in CASES for label in each])
    expected = np.mean(labels * np.logaddexp(0, -flat) + (1 - labels) * np.logaddexp(0, flat))
    assert found["val/loss"] == pytest.approx(expected)


def test_the_report_has_intervals_over_responses() -> None:
    report = step_report(rows_of(CASES), SCORES)
    assert report["found_error"]["responses"] == 3 and report["passed_right"]["responses"] == 2
    low, high = report["found_error"]["interval"]
    assert low < 1 / 3 < high
    assert report["by_tag"]["a"]["passed_right"] == {}
    assert "first error found in 0.3333 of 3 responses" in step_line(report)
    alone = step_report(rows_of(CASES[3:]), {n: SCORES[n + 3] for n in range(2)})
    assert alone["found_error"] == {} and "first error" not in step_line(alone)
