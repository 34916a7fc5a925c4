"""Chains of sums: every label is what its step deserves, and nothing is in two files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.prepare import chains


def test_chains_are_labelled_as_their_steps_are(tmp_path: Path) -> None:
    """By hand: a step that is right so far follows from the prompt and the steps before; after a wrong one all are false."""
    folder = chains.write_chains(tmp_path, num_steps=400, num_sft=20, num_train=20, num_validation=50, seed=3)
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (folder / "steps_validation.jsonl").read_text().splitlines()]
    assert len(rows) == 400 and not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    for row in (*rows, *held_out):
        numbers = [int(each) for each in row["prompt"].rstrip("=").split("+")]
        right = [
            step == wanted for step, wanted in zip(row["completions"], chains.worked(numbers), strict=True)
        ]
        wrong = right.index(False) if False in right else len(right)
        assert row["labels"] == [place < wrong for place in range(len(right))]
        assert (row["tag"] == "right") == (wrong == len(right))
    assert {row["tag"] for row in rows} == {"right", *chains.WAYS}
    with pytest.raises(ValueError, match="more than"):
        chains.write_chains(tmp_path, num_steps=chains.MOST)
