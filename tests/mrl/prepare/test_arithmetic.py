"""The quickstart's task: pairs are of training sums, and more of them than there are sums ask each again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrl.prepare import arithmetic_rows


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """100 sums: 16 to validate, 8 demonstrated, 76 to train on."""
    return arithmetic_rows.write_arithmetic(tmp_path / "one", largest=9, num_validation=16, num_sft=8)


def test_pairs_are_of_sums_to_train_on(small: Path) -> None:
    pairs = rows(small / "pairs.jsonl")
    assert [row["prompt"] for row in pairs] == [row["prompt"] for row in rows(small / "train.jsonl")]
    for row in pairs + rows(small / "pairs_validation.jsonl"):
        assert eval(row["prompt"].rstrip("=")) == int(row["chosen"])
        differing = [a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)]
        assert sum(differing) == 1


def test_more_pairs_than_sums_are_further_wrong_answers(small: Path, tmp_path: Path) -> None:
    more = arithmetic_rows.write_arithmetic(
        tmp_path / "more", largest=9, num_validation=16, num_sft=8, num_pairs=200
    )
    pairs = rows(more / "pairs.jsonl")
    assert pairs[:76] == rows(small / "pairs.jsonl")
    assert sorted(Counter(row["prompt"] for row in pairs).values()) == [2] * 28 + [3] * 48
    assert len({(row["prompt"], row["rejected"]) for row in pairs}) > 150
    for name in ("train.jsonl", "validation.jsonl", "sft.jsonl", "pairs_validation.jsonl"):
        assert (more / name).read_bytes() == (small / name).read_bytes()
