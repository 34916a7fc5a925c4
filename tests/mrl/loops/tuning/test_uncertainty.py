"""What is said of several heads, each one's accuracy and the disagreement, and of distributions, in and out of what pairs had."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrl.config.sections.tune import CenterSection, DistributionSection, ObjectiveSection
from mrl.data.conversation import Encoded
from mrl.data.pairs import PairLabel
from mrl.data.tune_rows import TuneRow
from mrl.loops.tuning.uncertainty import means_of, spread_figures, spread_line, spread_report, spreads
from mrl.observe.metric_names import undescribed

HEADS = ObjectiveSection(name="reward_model", heads=2, center=CenterSection(weight=0.01))
DISTRIBUTION = ObjectiveSection(name="reward_model", distribution=DistributionSection())
RESPONSE = Encoded(np.arange(4), np.array([False, False, True, True]), 2)
ROWS = [
    TuneRow("0", (RESPONSE, RESPONSE), (True, False), weight=3.0),
    TuneRow("1", (RESPONSE, RESPONSE), (True, False), label=PairLabel(probability=0.8)),
]
SCORES = {0: np.array([[2.0, 0.0], [1.0, 1.0]]), 1: np.array([[0.0, 5.0], [1.0, 5.0]])}
"""Of two heads: the first is right and wrong, the second wrong and undecided. Disagreements 1, 0, 2.5, 2."""
PROBES = {"gibberish": {0: np.array([[0.0, 8.0]]), 1: np.array([[1.0, 5.0]])}}
"""Disagreements 4 and 2."""


def test_the_figures_of_several_heads() -> None:
    assert means_of(HEADS, SCORES) == {0: [1.0, 1.0], 1: [2.5, 3.0]}
    assert spreads(HEADS, SCORES).tolist() == [1.0, 0.0, 2.5, 2.0]
    figures = spread_figures(HEADS, ROWS, SCORES, PROBES)
    first, second = (3 * 1 + 0.2) / 4, (3 * 0 + 0.5) / 4
    assert figures == pytest.approx(
        {
            "val/preference/head_accuracy": (first + second) / 2,
            "val/preference/disagreement": 5.5 / 4,
            "val/preference/disagreement/gibberish": 3.0,
        }
    )
    assert not undescribed(figures)


def test_the_report_says_how_often_a_probe_is_disagreed_on_more() -> None:
    report = spread_report(HEADS, ROWS, SCORES, PROBES)
    assert report["count"] == 2 and report["accuracy_of_each"] == pytest.approx([0.8, 0.125])
    # 4 is above all of the four; 2 is above two and ties with one
    assert report["probes"]["gibberish"] == {
        "disagreement": 3.0,
        "above_held_out": pytest.approx((1 + 2.5 / 4) / 2),
    }
    line = spread_line(HEADS, report)
    assert "2 heads" in line and "held out 1.375" in line and "gibberish 3.000 (above held-out 0.81)" in line


def test_a_distributions_deviation_is_told_by_tag() -> None:
    """Of the same numbers as means and logarithms of deviations."""
    rows = [dataclasses.replace(row, tag=tag) for row, tag in zip(ROWS, ("clean", "noisy"), strict=True)]
    assert means_of(DISTRIBUTION, SCORES) == {0: [2.0, 1.0], 1: [0.0, 1.0]}
    sigmas = np.exp([0.0, 1.0, 5.0, 5.0])
    assert spreads(DISTRIBUTION, SCORES) == pytest.approx(sigmas)
    figures = spread_figures(DISTRIBUTION, rows, SCORES, PROBES)
    probed = np.exp([8.0, 5.0])
    assert figures == pytest.approx(
        {"val/preference/sigma": sigmas.mean(), "val/preference/sigma/gibberish": probed.mean()}
    )
    assert not undescribed(figures)
    report = spread_report(DISTRIBUTION, rows, SCORES, PROBES)
    assert report["by_tag"] == {
        "clean": {"sigma": pytest.approx(sigmas[:2].mean()), "above_others": 0.0},
        "noisy": {"sigma": pytest.approx(sigmas[2:].mean()), "above_others": 1.0},
    }
    assert report["probes"]["gibberish"]["above_held_out"] == pytest.approx((1 + 3 / 4) / 2)
    assert "sigma: held out 75.1" in spread_line(DISTRIBUTION, report) and "noisy 148.4" in spread_line(
        DISTRIBUTION, report
    )
