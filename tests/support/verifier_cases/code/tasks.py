"""Small tasks in several formats, each with a correct and a close incorrect program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A task, and possible responses to it."""

    entry_point: str | None
    ground_truth: Mapping[str, Any]
    """As in a row."""
    right: str
    wrong: str
    usage: str
    """A block that uses the program and does not define it."""


def _function(name: str, right: str, wrong: str, cases: list[tuple[list[Any], Any]]) -> Problem:
    ground_truth = {
        "entry_point": name,
        "cases": [{"args": args, "expected": value} for args, value in cases],
    }
    return Problem(name, ground_truth, right, wrong, f"print({name}(*{cases[0][0]!r}))")


PROBLEMS = (
    _function(
        "add",
        "def add(a, b):\n    return a + b",
        "def add(a, b):\n    return abs(a) + b",
        [([1, 2], 3), ([-5, 3], -2), ([2**70, 1], 2**70 + 1)],
    ),
    _function(
        "halves",
        "from typing import List\n\ndef halves(xs: List[int]) -> List[float]:\n"
        "    return [x / 2 for x in xs]",
        "def halves(xs):\n    return [x // 2 for x in xs]",
        [([[1, 2]], [0.5, 1.0]), ([[]], [])],
    ),
    _function(
        "counts",
        "from collections import Counter\ncounts = lambda text: Counter(text)",
        "def counts(text):\n    return {c: 1 for c in text}",
        [(["aab"], {"a": 2, "b": 1}), ([""], {})],
    ),
    _function(
        "is_even",
        "class Parity:\n    def is_even(self, n):\n        return not n % 2\nis_even = Parity().is_even",
        "def is_even(n):\n    return bool(n % 2)",
        [([4], True), ([7], False)],
    ),
    Problem(
        "double",
        {
            "entry_point": "double",
            "prompt": "def double(text):\n    '''The text twice.'''\n",
            "test": "def check(candidate):\n    assert candidate('ab') == 'abab'\n"
            "    assert candidate('') == ''\n",
        },
        "    return text * 2",
        "    return text + text[:1]",
        "print(double('ab'))",
    ),
    Problem(
        None,
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(3)",
        "3",
    ),
)
