"""Pairs for the step tests, their layouts, and the comparison of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mrl.data.conversation import Encoded
from mrl.data.tune_rows import TuneRow, TuneRows, reward_model_rows
from mrl.data.tune_shapes import PairLabel
from tests.mrl.training.layouts import name_of
from tests.tiny_models import VOCAB

Steps = list[dict[str, float]]


def pairs(count: int = 9) -> list[TuneRow]:
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 9))
        responses = []
        for _ in range(2):
            tokens = np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(1, 14))])
            responses.append(Encoded(tokens, np.arange(len(tokens)) >= len(prompt), len(prompt)))
        rows.append(TuneRow(f"row {number}", tuple(responses), (True, False)))
    return rows


def scored_pairs() -> tuple[TuneRow, ...]:
    """Return uneven pairs for a reward model, some with a margin or a soft label."""
    labels = (PairLabel(), PairLabel(margin=0.4), PairLabel(probability=0.7))
    plain = [dataclasses.replace(row, label=labels[n % 3]) for n, row in enumerate(pairs())]
    return reward_model_rows(TuneRows(tuple(plain), None, "")).rows


LAYOUTS: list[tuple[dict[str, int], int]] = [({}, 1), ({"ep": 2, "dp": 2}, 64)]
LONG_LAYOUTS: list[tuple[dict[str, int], int]] = [({"cp": 2}, 64), ({"tp": 2, "pp": 2}, 1)]
"""Layouts, and microbatches of one pair and of several."""


def name(value: dict[str, int] | int) -> str:
    return name_of(value) if isinstance(value, dict) else str(value)


def told_of(values: Mapping[int, Sequence[float] | np.ndarray]) -> dict[str, float]:
    """Return the results of row_logprobs() or row_scores() by row, side and head."""
    return {f"{n}.{i}": float(x) for n, row in values.items() for i, x in enumerate(np.ravel(row))}


def compare(steps: Steps, wanted: Steps) -> None:
    """Check row results and step metrics against one rank's, except moe/, which counts padding."""
    for ours, theirs in zip(steps, wanted, strict=True):
        assert ours.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=5e-6)
        ours, theirs = (
            {n: v for n, v in metrics.items() if n != "grad_norm" and not n.startswith("moe/")}
            for metrics in (ours, theirs)
        )
        assert ours == pytest.approx(theirs, rel=2e-6, abs=2e-6)
