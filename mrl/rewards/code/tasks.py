"""Code tasks as rows give them, checked when they are loaded.

    function   {"entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}, ...]}
               {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}
    stdin      {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]} or {"inputs": ["1 2"], "outputs": ["3"]}
    asserts    {"entry_point": "add", "test": "def check(candidate): ...", "prompt": code before the candidate's}
               {"entry_point": "add", "test_list": ["assert add(1, 2) == 3", ...]}

A JSON text of any of these works too. Asserts and their context are the data set's, so they are trusted;
they run in the verifier, never beside the candidate.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mrl.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One input with what is expected of it; for stdin tasks both are text."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    expected: Any = None
    stdin: str = ""
    stdout: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CodeTask:
    """What a program has to do."""

    entry_point: str | None
    """The function to call; None for programs that read standard input."""
    cases: tuple[Case, ...] = ()
    context: str = ""
    """Code that stands before the candidate's (a signature with its doc, imports)."""
    test: str = ""
    """Assert-style test; empty where there are cases."""
    tolerance: float = 1e-6
    """Relative error allowed between floats."""


def parse_task(raw: Any, *, place: str) -> CodeTask:
    """A row's task. Raises DataError naming the place and what is missing."""
    if isinstance(raw, CodeTask):
        return raw
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError as error:
            raise DataError(
                f"{place}: the code task is no JSON: {error}; it starts with {raw[:60]!r}"
            ) from error
    if not isinstance(raw, dict):
        raise DataError(f"{place}: a code task is an object, not {str(raw)[:80]!r}")
    entry_point = raw.get("entry_point") or raw.get("fn_name")
    test = raw.get("test") or "\n".join(raw.get("test_list") or ())
    if test:
        _compiles(test, place, "test")
        context = str(raw.get("prompt") or raw.get("context") or "")
        if not entry_point:
            raise DataError(f"{place}: a task with asserts names its entry_point")
        return CodeTask(entry_point=entry_point, context=context, test=test)
    cases = _cases(raw, entry_point, place)
    if not cases:
        raise DataError(
            f"{place}: a code task has cases, inputs and outputs, test or test_list; has {sorted(raw)}"
        )
    return CodeTask(
        entry_point=entry_point,
        cases=cases,
        context=str(raw.get("prompt") or raw.get("context") or ""),
        tolerance=float(raw.get("tolerance", 1e-6)),
    )


def _cases(raw: dict[str, Any], entry_point: str | None, place: str) -> tuple[Case, ...]:
    if "inputs" in raw:
        inputs, outputs = raw["inputs"], raw.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise DataError(f"{place}: inputs and outputs are lists of the same length")
        if entry_point:
            return tuple(
                Case(args=tuple(_listed(i)), expected=o) for i, o in zip(inputs, outputs, strict=True)
            )
        return tuple(Case(stdin=_text(i), stdout=_text(o)) for i, o in zip(inputs, outputs, strict=True))
    return tuple(_case(case, entry_point, place) for case in raw.get("cases") or ())


def _case(case: Any, entry_point: str | None, place: str) -> Case:
    required = ("args", "expected") if entry_point else ("stdin", "stdout")
    if not isinstance(case, dict) or any(name not in case for name in required):
        raise DataError(f"{place}: a case has {' and '.join(required)}; this one is {str(case)[:80]!r}")
    if not entry_point:
        return Case(stdin=_text(case["stdin"]), stdout=_text(case["stdout"]))
    kwargs = case.get("kwargs") or {}
    return Case(args=tuple(_listed(case["args"])), kwargs=tuple(kwargs.items()), expected=case["expected"])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _compiles(source: str, place: str, what: str) -> None:
    try:
        compile(source, what, "exec")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{place}: the task's {what} does not compile: {error}") from error
