"""Each head's bootstrap: Poisson counts that depend on a row's tokens, the head and the seed, and on nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from mrl.data.bootstrap import bootstrap_counts
from mrl.data.conversation import Encoded
from mrl.data.tune_rows import TuneRow, batch_of

HEADS = 4


def row(*responses: list[int], place: str = "file:1") -> TuneRow:
    encoded = tuple(Encoded(np.array(tokens), np.arange(len(tokens)) > 0, 1) for tokens in responses)
    return TuneRow(place, encoded, (True, False))


ROWS = [row([1, a, b], [1, b, a, 7], place=f"file:{a}") for a, b in itertools.product(range(100), repeat=2)]


def test_counts_are_poisson_and_heads_draw_apart() -> None:
    counts = bootstrap_counts(ROWS, HEADS, seed=3)
    assert counts.shape == (len(ROWS), HEADS) and counts.dtype == np.float64
    error = 1 / len(ROWS) ** 0.5
    for head in range(HEADS):
        own = counts[:, head]
        assert own.mean() == pytest.approx(1.0, abs=4 * error) and own.var() == pytest.approx(
            1.0, abs=8 * error
        )
        for count in range(4):
            wanted = math.exp(-1) / math.factorial(count)
            assert (own == count).mean() == pytest.approx(wanted, abs=4 * error), (head, count)
    for one, other in itertools.combinations(range(HEADS), 2):
        assert abs(np.corrcoef(counts[:, one], counts[:, other])[0, 1]) < 4 * error
    other_seed = bootstrap_counts(ROWS, HEADS, seed=4)
    assert abs(np.corrcoef(counts.ravel(), other_seed.ravel())[0, 1]) < 4 * error


def test_neither_order_nor_place_nor_how_many_heads_there_are_changes_a_count() -> None:
    counts = bootstrap_counts(ROWS[:50], HEADS, seed=3)
    assert (bootstrap_counts(ROWS[:50], HEADS + 2, seed=3)[:, :HEADS] == counts).all()
    moved = [dataclasses.replace(each, place="other:9", weight=0.5, tag="x") for each in reversed(ROWS[:50])]
    assert (bootstrap_counts(moved, HEADS, seed=3)[::-1] == counts).all()


def test_where_a_response_ends_is_part_of_the_row() -> None:
    """[1 2] [3 4] and [1 2 3] [4] are different pairs of the same tokens in a row."""
    pairs = [(row([n, 2], [3, 4]), row([n, 2, 3], [4])) for n in range(50)]
    found = [bootstrap_counts(pair, HEADS, seed=0) for pair in pairs]
    assert any((one != other).any() for one, other in found)


def test_both_responses_of_a_pair_have_its_counts() -> None:
    counts = bootstrap_counts(ROWS[:5], HEADS, seed=3)
    batch = batch_of(ROWS[:5], range(5), bootstrap=counts)
    assert (batch.samples["bootstrap"] == np.repeat(counts, 2, axis=0)).all()
    assert (batch.select(np.array([4, 5])).samples["bootstrap"] == counts[[2, 2]]).all()
