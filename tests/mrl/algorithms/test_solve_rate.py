"""Solve rates: the posterior against mpmath's incomplete beta function, and what a band keeps of a made-up mixture."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from mrl.algorithms.solve_rate import Band, SolveRate


@pytest.mark.parametrize(
    ("samples", "solved"), [(0, 0), (4, 0), (4, 3), (32, 0), (32, 16), (32, 31), (64, 64)]
)
def test_the_posterior_is_the_beta_distribution(samples: int, solved: int) -> None:
    rate, (a, b) = SolveRate(samples, solved), (solved + 0.5, samples - solved + 0.5)

    def below(p: float) -> float:
        return float(mpmath.betainc(a, b, 0, p, regularized=True))

    for p in (0.01, 0.1, 0.5, 0.9, 0.999):
        assert rate.below(p) == pytest.approx(below(p), abs=1e-5)
    low, high = rate.interval(0.9)
    assert (below(low), below(high)) == pytest.approx((0.05, 0.95), abs=1e-4)
    assert rate.mean == pytest.approx(a / (a + b))
    power = mpmath.beta(a + 8, b) / mpmath.beta(a, b) + mpmath.beta(a, b + 8) / mpmath.beta(a, b)
    assert rate.with_gradient(8) == pytest.approx(float(1 - power))


def test_a_rate_has_a_place_once_one_is_probable_enough() -> None:
    band = Band(0.1, 0.9, 0.9)
    assert band.place(SolveRate(4, 0)) == band.place(SolveRate(8, 0)) == "unknown"
    assert [band.place(SolveRate(16, solved)) for solved in (0, 8, 16)] == ["below", "inside", "above"]
    assert band.place(SolveRate(4, 2)) == "inside"
    assert Band(0.0, 0.9, 0.9).place(SolveRate(64, 0)) == "inside"


def test_few_samples_tell_the_useful_prompts_of_a_mixture_from_the_useless() -> None:
    """3 in 10 prompts are never solved, 1 in 5 always, 1 in 10 once in a hundred times; the others between 0.15 and 0.85."""
    random, band = np.random.default_rng(5), Band(0.1, 0.9, 0.9)
    rates = np.concatenate([np.zeros(300), np.ones(200), np.full(100, 0.01), random.uniform(0.15, 0.85, 400)])
    kept, samples = np.zeros(len(rates), bool), np.zeros(len(rates), int)
    for number, p in enumerate(rates):
        found = SolveRate(0, 0)
        while found.samples < 32 and band.place(found) == "unknown":
            found = SolveRate(found.samples + 4, found.solved + int(random.binomial(4, p)))
        kept[number], samples[number] = band.place(found) in ("inside", "unknown"), found.samples
    useful = (rates > 0.1) & (rates < 0.9)
    assert kept[useful].mean() >= 0.95 and kept[~useful].mean() <= 0.1
    assert samples.mean() <= 0.6 * 32
