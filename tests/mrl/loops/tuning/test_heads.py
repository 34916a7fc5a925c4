"""What a validation says of several heads: each one's accuracy and their disagreement."""

from __future__ import annotations

import numpy as np
import pytest

from mrl.config.sections.tune import CenterSection, ObjectiveSection
from mrl.data.conversation import Encoded
from mrl.data.pairs import PairLabel
from mrl.data.tune_rows import TuneRow
from mrl.loops.tuning.figures import means_of, score_figures
from mrl.observe.metric_names import undescribed

HEADS = ObjectiveSection(name="reward_model", heads=2, center=CenterSection(weight=0.01))
RESPONSE = Encoded(np.arange(4), np.array([False, False, True, True]), 2)
ROWS = [
    TuneRow("0", (RESPONSE, RESPONSE), (True, False), weight=3.0),
    TuneRow("1", (RESPONSE, RESPONSE), (True, False), label=PairLabel(probability=0.8)),
]
SCORES = {0: np.array([[2.0, 0.0], [1.0, 1.0]]), 1: np.array([[0.0, 5.0], [1.0, 5.0]])}
"""Of two heads: the first is right and wrong, the second wrong and undecided. Disagreements 1, 0, 2.5, 2."""


def test_the_figures_of_several_heads() -> None:
    assert means_of(SCORES) == {0: [1.0, 1.0], 1: [2.5, 3.0]}
    figures = score_figures(HEADS, ROWS, SCORES)
    first, second = (3 * 1 + 0.2) / 4, (3 * 0 + 0.5) / 4
    assert figures["val/preference/head_accuracy"] == pytest.approx((first + second) / 2)
    assert figures["val/preference/disagreement"] == pytest.approx(5.5 / 4)
    assert not undescribed(figures)
