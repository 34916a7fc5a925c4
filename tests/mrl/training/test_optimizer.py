"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from mrl.config.training import OptimizerSection
from mrl.training.optimizer import learning_rate


def test_warmup_reaches_the_peak_and_stays() -> None:
    section = OptimizerSection(lr=2.0, warmup_steps=4)
    assert [learning_rate(section, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_the_smallest_rate(schedule: str, middle: float) -> None:
    section = OptimizerSection(lr=1.0, min_lr=0.1, schedule=schedule, decay_steps=10)  # type: ignore[arg-type]
    rates = [learning_rate(section, step) for step in range(15)]
    assert rates[0] == 1.0 and rates[5] == pytest.approx(middle)
    assert rates[10:] == pytest.approx([0.1] * 5)
    assert rates == sorted(rates, reverse=True)
