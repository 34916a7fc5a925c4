"""Responses with the program in some style of fence among other blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.support.verifier_cases.case import Case
from tests.support.verifier_cases.code.tasks import PROBLEMS, Problem

_MARKS = ("```", "````", "``````", "~~~", "~~~~~")
_INFOS = (
    "python", "py", "Python", "python3", 'python title="x.py"', "{.python}", "python:main.py",
    " python {1,3}",
)  # fmt: skip
_PREFIXES = ("", "", " ", "   ", "      ", "\t", "> ", "- ", "1. ")
_PROSE = ("", "Here is the solution.", "It uses `len` and ``x``.", "1. First we count.", "### Solution")


def fences(rng: random.Random) -> Iterator[Case]:
    while True:
        for label, (layout, right) in _LAYOUTS.items():
            problem = rng.choice(PROBLEMS if label in _OF_ALL else PROBLEMS[:-2])
            response = layout(problem, rng)
            if rng.random() < 0.1:
                response = response.replace("\n", "\r\n")
            yield Case("code", response, problem.ground_truth, right, label)


def _fenced(text: str, rng: random.Random, *, info: str | None = None, prefix: str | None = None) -> str:
    marks = rng.choice(_MARKS)
    prefix = rng.choice(_PREFIXES) if prefix is None else prefix
    indent = prefix if prefix.strip() in ("", ">") else " " * len(prefix)
    info = rng.choice(_INFOS) if info is None else info
    return "\n".join([prefix + marks + info, *(indent + line for line in text.split("\n")), indent + marks])


def _talk(rng: random.Random, *parts: str) -> str:
    return "\n\n".join(text for part in parts for text in (rng.choice(_PROSE), part))


def _alone(source: str) -> Callable[[Problem, random.Random], str]:
    return lambda problem, rng: _talk(rng, _fenced(getattr(problem, source), rng))


def _then(first: str, second: str) -> Callable[[Problem, random.Random], str]:
    return lambda p, rng: _talk(rng, _fenced(getattr(p, first), rng), _fenced(getattr(p, second), rng))


def _used(source: str, info: str) -> Callable[[Problem, random.Random], str]:
    return lambda p, rng: _talk(
        rng, _fenced(getattr(p, source), rng, info="python"), _fenced(p.usage, rng, info=info)
    )


def _thought(source: str, opening: str, closing: str) -> Callable[[Problem, random.Random], str]:
    return lambda p, rng: f"{opening}{_fenced(getattr(p, source), rng)}\n{closing}"


def _thought_then(first: str, second: str) -> Callable[[Problem, random.Random], str]:
    return lambda p, rng: (
        f"<think>\n{_fenced(getattr(p, first), rng)}\n</think>\n{_fenced(getattr(p, second), rng)}"
    )


def _nested(source: str) -> Callable[[Problem, random.Random], str]:
    def layout(problem: Problem, rng: random.Random) -> str:
        inner = f"Text.\n\n```python\n{getattr(problem, source)}\n```\n"
        outer = rng.choice(("````markdown", "~~~~md", "`````"))
        return f"{outer}\n{inner}\n{outer.rstrip('markdown')}\n"

    return layout


def _documented(problem: Problem, rng: random.Random) -> str:
    example = f'NOTE = """\n    ```python\n    {problem.usage}\n    ```\n"""\n'
    return _fenced(example + problem.right, rng, prefix="")


def _unclosed(problem: Problem, rng: random.Random) -> str:
    return _fenced(problem.right, rng, prefix="").rpartition("\n")[0]


def _closed_by_another(problem: Problem, rng: random.Random) -> str:
    return f"````python\n{problem.right}\n```\n"


_LAYOUTS: dict[str, tuple[Callable[[Problem, random.Random], str], bool]] = {
    "one block": (_alone("right"), True), "one wrong block": (_alone("wrong"), False),
    "used after it": (_used("right", "python"), True),
    "wrong one used after it": (_used("wrong", "python"), False),
    "output after it": (_used("right", "text"), True), "unnamed output after it": (_used("right", ""), True),
    "mended by the last": (_then("wrong", "right"), True),
    "spoilt by the last": (_then("right", "wrong"), False),
    "right only in the thought": (_thought("right", "<think>\n", "</think>\nDone."), False),
    "in a thought that stays open": (_thought("right", "Well.\n<think>\n", ""), False),
    "wrong in the thought": (_thought_then("wrong", "right"), True),
    "wrong after the thought": (_thought_then("right", "wrong"), False), "nested": (_nested("right"), True),
    "nested wrong": (_nested("wrong"), False), "fences in a string": (_documented, True),
    "never closed": (_unclosed, False), "closed by too few": (_closed_by_another, False),
    "without a fence": (lambda problem, rng: problem.right, True),
}  # fmt: skip
_OF_ALL = ("one block", "one wrong block", "nested", "nested wrong", "mended by the last",
           "spoilt by the last", "output after it", "unnamed output after it", "without a fence",
           "never closed")  # fmt: skip
