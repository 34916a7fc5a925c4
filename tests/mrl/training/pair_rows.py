"""Pairs for the tests of a step, and what of its metrics is compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mrl.data.conversation import Encoded
from mrl.data.pairs import PairLabel
from mrl.data.tune_rows import TuneRow, TuneRows, scored
from tests.tiny_models import VOCAB


def pairs(count: int = 9) -> list[TuneRow]:
    """Random pairs of uneven length."""
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 9))
        responses = []
        for _ in range(2):
            tokens = np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(1, 14))])
            responses.append(Encoded(tokens, np.arange(len(tokens)) >= len(prompt), len(prompt)))
        rows.append(TuneRow(f"row {number}", tuple(responses), (True, False), 1.0 + number % 2))
    return rows


def scored_pairs() -> tuple[TuneRow, ...]:
    """Pairs of uneven length, some with a margin or a soft label, as a reward model takes them."""
    labels = (PairLabel(), PairLabel(margin=0.4), PairLabel(probability=0.7))
    plain = [dataclasses.replace(row, label=labels[n % 3]) for n, row in enumerate(pairs())]
    return scored(TuneRows(tuple(plain), None, "")).rows


def without_load(metrics: dict[str, Any]) -> dict[str, Any]:
    """How tokens are spread over experts counts each microbatch's padding."""
    return {name: value for name, value in metrics.items() if not name.startswith("moe/")}
