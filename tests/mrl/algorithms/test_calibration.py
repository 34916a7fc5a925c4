"""The temperature that was planted is found, and a report says of its error how much is chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrl.algorithms.calibration import Bins, fit_temperature, report


def planted(pairs: int, temperature: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Differences that are `temperature` times the log-odds of their labels; the chosen side is the label's."""
    generator = np.random.default_rng(seed)
    odds = generator.normal(0, 1.5, pairs)
    chosen = generator.random(pairs) < 1 / (1 + np.exp(-odds))
    return temperature * np.where(chosen, odds, -odds), np.ones(pairs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_planted_temperature_is_found_within_three_standard_errors(temperature: float) -> None:
    odds = np.linspace(-9, 9, 4001)
    density = np.exp(-((odds / 1.5) ** 2) / 2)
    known = np.average(odds**2 / (2 + 2 * np.cosh(odds)), weights=density)  # information of a pair at T = 1
    off, errors = [], []
    for seed in range(20):
        found = fit_temperature(*planted(2000, temperature, seed))
        off.append((found.value - temperature) / found.error)
        errors.append(found.error)
    assert np.mean(errors) == pytest.approx(temperature / math.sqrt(2000 * known), rel=0.05)
    assert np.abs(off).max() < 3 and 0.6 < np.std(off) < 1.5


def test_the_temperature_is_where_the_likelihood_is_largest() -> None:
    difference, probability = planted(500, 2.0, 3)
    probability = np.where(np.arange(500) % 3, probability, 0.7)
    found = fit_temperature(difference, probability).value
    grid = np.linspace(0.2, 6.0, 5801)
    logits = difference / grid[:, None]
    nll = (probability * np.logaddexp(0, -logits) + (1 - probability) * np.logaddexp(0, logits)).mean(1)
    assert found == pytest.approx(grid[nll.argmin()], abs=2e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pairs_without_an_error_bound_no_temperature(sign: float) -> None:
    difference = sign * np.random.default_rng(0).uniform(0.5, 2.0, 400)
    assert math.isinf(fit_temperature(difference, np.ones(400)).error)
    told = report(difference, np.ones(400))
    assert told["temperature"] is None and "calibrated" not in told and told["raw"]["nll"] > 0


def test_an_overconfident_model_is_told_from_its_floor_and_mended() -> None:
    difference, probability = planted(4000, 3.0, 5)
    told = report(difference, probability)
    assert abs(told["temperature"] - 3.0) < 3 * told["temperature_error"]
    raw, calibrated = told["raw"], told["calibrated"]
    assert raw["calibration_error"] > 0.1 > raw["floor_95"] and not raw["is_calibrated"]
    assert (
        calibrated["is_calibrated"] and calibrated["nll"] < raw["nll"] and calibrated["brier"] < raw["brier"]
    )
    # 0.0234 on average and 0.035 at the 95th percentile are known of 2,000 pairs of such odds.
    assert calibrated["floor_mean"] == pytest.approx(0.0234, abs=0.003)
    assert calibrated["floor_95"] == pytest.approx(0.035, abs=0.005)
    assert sum(each["pairs"] for each in calibrated["bins"]) == told["pairs_held"] == 2000


def test_true_probabilities_are_called_calibrated_as_often_as_the_floor_says() -> None:
    verdicts = [report(*planted(400, 1.0, seed), seed=seed)["raw"]["is_calibrated"] for seed in range(30)]
    assert np.mean(verdicts) > 0.85


def test_the_error_is_the_gap_of_the_bins() -> None:
    confidence, right = np.repeat([0.6, 0.9], 50), np.concatenate([np.ones(20), np.zeros(30), np.ones(50)])
    bins = Bins(confidence)
    assert bins.confidence == pytest.approx([0.6] * 5 + [0.9] * 5)
    # Of the bins of 0.6 two are all right and three all wrong; all of 0.9 are right.
    assert bins.error(right) == pytest.approx((2 * 0.4 + 3 * 0.6 + 5 * 0.1) / 10, abs=1e-12)


def test_few_pairs_say_nothing() -> None:
    assert report(np.ones(99), np.ones(99)) == {}
