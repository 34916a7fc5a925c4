"""Write the quickstart's task, sums of two numbers, as jsonl rows.

Rows of train and validation:         {"prompt": "37+58=", "answer": "95", "tag": "carry"}
Rows of sft:                          {"prompt": "37+58=", "response": "95"}
Rows of pairs and pairs_validation:   {"prompt": "37+58=", "chosen": "95", "rejected": "85"}

The tag says if a digit is carried. Every pair of summands is in exactly one of the first three files; all are
a pure function of the seed. Pairs use the sums of train or validation; the rejected answer has one incorrect
digit. If more pairs are requested than there are sums, sums repeat with another draw of the incorrect digit.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """One addition problem."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def tag(self) -> str:
        return "carry" if self.left % 10 + self.right % 10 > 9 else "plain"


def write_arithmetic(
    folder: str | Path,
    *,
    largest: int = 99,
    num_validation: int = 512,
    num_sft: int = 3000,
    num_pairs: int | None = None,
    seed: int = 0,
) -> Path:
    """Write train, validation, sft, pairs and pairs_validation .jsonl; return the folder.

    All (largest + 1)^2 ordered pairs are shuffled and dealt out: first validation, then sft, the rest to
    train. `num_pairs` is by default one per sum of train, at most 2,000.
    """
    pairs = [Sum(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    if num_validation + num_sft >= len(pairs):
        raise ValueError(f"{num_validation} + {num_sft} rows leave nothing of {len(pairs)} sums to train on")
    random.Random(seed).shuffle(pairs)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    validation, remaining = pairs[:num_validation], pairs[num_validation:]
    sft, train = remaining[:num_sft], remaining[num_sft:]
    write_rows(folder / "validation.jsonl", (_question(s) for s in validation))
    write_rows(folder / "train.jsonl", (_question(s) for s in train))
    write_rows(folder / "sft.jsonl", ({"prompt": s.prompt, "response": s.answer} for s in sft))
    wrong, num_pairs = random.Random(seed), min(2000, len(train)) if num_pairs is None else num_pairs
    write_rows(folder / "pairs_validation.jsonl", [_pair(s, wrong) for s in validation])
    write_rows(
        folder / "pairs.jsonl", [_pair(s, wrong) for s in itertools.islice(itertools.cycle(train), num_pairs)]
    )
    return folder


def _pair(problem: Sum, rng: random.Random) -> dict[str, str]:
    digits = list(problem.answer)
    place = rng.randrange(len(digits))
    least = 1 if place == 0 and len(digits) > 1 else 0
    digits[place] = rng.choice([d for d in map(str, range(least, 10)) if d != digits[place]])
    return {"prompt": problem.prompt, "chosen": problem.answer, "rejected": "".join(digits)}


def _question(problem: Sum) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": problem.answer, "tag": problem.tag}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a row a line, as JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
