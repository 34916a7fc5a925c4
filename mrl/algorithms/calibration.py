"""How far a reward model's differences are log-odds: the temperature that makes them so, and what error is left beside chance.

The probability that the chosen response of a pair is the better one is sig(d / T), d the difference of the scores; T = 1 where the
model is neither over- nor underconfident. T minimises the mean negative log-likelihood (Guo et al. 2017, arXiv 1706.04599) on one
half of held-out pairs, and the other half says how well it does. The expected calibration error of a finite number of pairs is not 0
for true probabilities either, so a report names its floor: the error that labels drawn from the calibrated probabilities have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

BINS = 10
DRAWS = 1000
MIN_PAIRS = 50
"""Of one half; with fewer nothing is said."""
_SHARPEST, _FLATTEST = 1e3, 1e-3
"""Bounds of 1 / T."""


@dataclasses.dataclass(frozen=True, slots=True)
class Temperature:
    """The scale of differences that fits labels best."""

    value: float
    error: float
    """Standard error by the information of the pairs; infinite where they do not bound T: none of them is wrong, or all are."""


def fit_temperature(difference: np.ndarray, probability: np.ndarray) -> Temperature:
    """T for [P] differences of scores, probability [P] that the chosen response is the better one.

    Newton's method, held in bounds by bisection, on 1 / T, in which the likelihood is concave.
    """
    low, high, inverse = _FLATTEST, _SHARPEST, 1.0
    for _ in range(200):
        predicted = _sigmoid(inverse * difference)
        slope = float(np.mean((predicted - probability) * difference))
        if slope > 0:
            high = inverse
        else:
            low = inverse
        bend = float(np.mean(difference**2 * predicted * (1 - predicted)))
        step = inverse - slope / bend if bend > 0 else high
        step = step if low < step < high else math.sqrt(low * high)
        if abs(step - inverse) <= 1e-12 * inverse:
            break
        inverse = step
    at_bound = inverse > 0.99 * _SHARPEST or inverse < 1.01 * _FLATTEST
    predicted = _sigmoid(inverse * difference)
    information = float(np.sum(difference**2 * predicted * (1 - predicted)))
    found = 1 / inverse
    error = math.inf if at_bound or information <= 0 else found**2 / math.sqrt(information)
    return Temperature(found, error)


class Bins:
    """[P] confidences in bins of as many pairs each."""

    def __init__(self, confidence: np.ndarray) -> None:
        self._order = np.argsort(confidence, kind="stable")
        parts = np.array_split(np.arange(len(confidence)), min(BINS, len(confidence)))
        self.sizes = np.array([len(part) for part in parts])
        self._starts = np.cumsum(self.sizes) - self.sizes
        self.confidence = self.means(confidence)

    def means(self, values: np.ndarray) -> np.ndarray:
        """[bins] of [P] values."""
        return np.add.reduceat(values[self._order].astype(np.float64), self._starts) / self.sizes

    def error(self, right: np.ndarray) -> float:
        """The expected calibration error where the pairs were right [P] so far: the bins' mean gap of confidence and right."""
        gaps = np.abs(self.confidence - self.means(right))
        return float(gaps @ self.sizes / self.sizes.sum())


def report(difference: np.ndarray, probability: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """What [P] held-out pairs say; empty where a half has fewer than MIN_PAIRS.

    The halves are drawn by `seed`. `raw` are the scores as they are, `calibrated` those divided by T.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(difference))
    fitted, held = order[: len(order) // 2], order[len(order) // 2 :]
    if len(fitted) < MIN_PAIRS:
        return {}
    found = fit_temperature(difference[fitted], probability[fitted])
    is_bounded = math.isfinite(found.error)
    result: dict[str, Any] = {
        "pairs_fitted": len(fitted),
        "pairs_held": len(held),
        "temperature": found.value if is_bounded else None,
        "temperature_error": found.error if is_bounded else None,
        "raw": _figures(difference[held], probability[held], generator),
    }
    if is_bounded:
        result["calibrated"] = _figures(difference[held] / found.value, probability[held], generator)
    return result


def _figures(logits: np.ndarray, probability: np.ndarray, generator: np.random.Generator) -> dict[str, Any]:
    """Of log-odds [P] against labels: error beside its floor, Brier score, negative log-likelihood, the table of bins."""
    confidence = _sigmoid(np.abs(logits))
    right = np.where(logits >= 0, probability, 1 - probability)
    bins = Bins(confidence)
    error = bins.error(right)
    floor = [bins.error(generator.random(len(confidence)) < confidence) for _ in range(DRAWS)]
    nll = probability * np.logaddexp(0, -logits) + (1 - probability) * np.logaddexp(0, logits)
    bound = float(np.quantile(floor, 0.95))
    return {
        "calibration_error": error,
        "floor_mean": float(np.mean(floor)),
        "floor_95": bound,
        "is_calibrated": error <= bound,
        "brier": float(np.mean((_sigmoid(logits) - probability) ** 2)),
        "nll": float(nll.mean()),
        "bins": [
            {"pairs": int(size), "confidence": float(said), "right": float(was)}
            for size, said, was in zip(bins.sizes, bins.confidence, bins.means(right), strict=True)
        ],
    }


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
