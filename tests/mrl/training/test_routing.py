"""Metrics of a known load."""

import numpy as np
import pytest

from mrl.training.router_loads import load_metrics


def test_even_and_collapsed_layers_have_the_extreme_figures() -> None:
    visits = np.array([[5, 5, 5, 5], [0, 0, 0, 0], [20, 0, 0, 0]])
    metrics = load_metrics(visits)
    assert metrics == pytest.approx(
        {
            "moe/load_max_over_mean": 2.5,
            "moe/load_max_over_mean_max": 4.0,
            "moe/load_entropy": 0.5,
            "moe/load_entropy_min": 0.0,
            "moe/layers/000/load_max_over_mean": 1.0,
            "moe/layers/000/load_entropy": 1.0,
            "moe/layers/002/load_max_over_mean": 4.0,
            "moe/layers/002/load_entropy": 0.0,
        }
    )


def test_entropy_is_of_the_shares_over_its_largest() -> None:
    shares = np.array([0.5, 0.25, 0.25, 0.0])
    expected = -(0.5 * np.log(0.5) + 0.5 * np.log(0.25)) / np.log(4)
    assert load_metrics((shares * 8)[None])["moe/load_entropy"] == pytest.approx(expected)


def test_a_model_without_routers_has_no_figures() -> None:
    assert load_metrics(np.zeros((4, 8), np.int64)) == load_metrics(np.zeros((0, 0), np.int64)) == {}
