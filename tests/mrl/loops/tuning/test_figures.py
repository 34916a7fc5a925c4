"""Validation metrics of pairs: over all, and per tag."""

from __future__ import annotations

import numpy as np
import pytest

from mrl.algorithms.preference import PAIR_LOSSES
from mrl.config.sections.tune import ObjectiveSection
from mrl.data.conversation import Encoded
from mrl.data.tune_rows import TuneRow
from mrl.loops.tuning.figures import preference_figures, score_figures, score_report
from mrl.observe.metric_names import undescribed

RESPONSE = Encoded(np.arange(4), np.array([False, False, True, True]), 2)
PAIRS = ((2.0, 1.0), (0.0, 1.0), (3.0, 3.0), (1.0, 0.0))
SCORES = {number: np.array(scores) for number, scores in enumerate(PAIRS)}


def rows_of(*tags: str) -> list[TuneRow]:
    return [TuneRow(str(n), (RESPONSE, RESPONSE), (True, False), tag=tag) for n, tag in enumerate(tags)]


def test_each_tag_has_its_accuracy() -> None:
    rows, section = rows_of("near", "near", "far", ""), ObjectiveSection(name="reward_model")
    figures = score_figures(section, rows, SCORES)
    assert figures["val/preference/accuracy"] == pytest.approx(2.5 / 4)
    by_tag = {name.rpartition("/")[2]: value for name, value in figures.items() if "accuracy/" in name}
    assert by_tag == {"near": 0.5, "far": 0.5, "untagged": 1.0} and not undescribed(figures)
    report = score_report(rows, SCORES)["by_tag"]
    assert {tag: (entry["pairs"], entry["accuracy"]) for tag, entry in report.items()} == {
        "near": (2, 0.5),
        "far": (1, 0.5),
        "untagged": (1, 1.0),
    }
    assert report["near"]["accuracy_interval"][0] < 0.5 < report["near"]["accuracy_interval"][1]
    section = ObjectiveSection(name="dpo")
    dpo = preference_figures(section, PAIR_LOSSES["dpo"], rows, SCORES, dict.fromkeys(range(4), (0.0, 0.0)))
    assert {name.rpartition("/")[2]: v for name, v in dpo.items() if "accuracy/" in name} == by_tag


def test_rows_that_are_all_alike_have_no_tags() -> None:
    rows, section = rows_of("near", "near", "near", "near"), ObjectiveSection(name="reward_model")
    assert not any("accuracy/" in name for name in score_figures(section, rows, SCORES))
    assert score_report(rows, SCORES)["by_tag"] == {}
