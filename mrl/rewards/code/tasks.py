"""Code tasks of data rows, checked at load.

    function   {"entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}, ...]}
               {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}
               {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [[3], ...]}     in APPS and TACO
               {"fn_name": "add", "inputs": ["1\\n2", ...], "outputs": ["3", ...]}    in LiveCodeBench
    stdin      {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]} or {"inputs": ["1 2"], "outputs": ["3"]}
    asserts    {"entry_point": "add", "test": "def check(candidate): ...", "prompt": code before the program}
               {"entry_point": "add", "test_list": ["assert add(1, 2) == 3", ...]}

A JSON text of any of these works too. Cases may have a `tolerance`, and the function may be a method of a
class `Solution` ("Solution().add" works too). Texts in LiveCodeBench's inputs and outputs are JSON. Asserts
and their context are trusted, because they come from the data set; they run in the verifier, never with the
candidate. A task that no program can pass is refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from mrl.errors import DataError
from mrl.rewards.code.code_rules import OUTPUT_KIB, CodeRules
from mrl.rewards.code.tagged_values import decode_value, encode_value


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One input and its expected result; for stdin tasks both are text."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    expected: Any = None
    stdin: str = ""
    stdout: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CodeTask:
    """Task for a program."""

    entry_point: str | None
    """Function to call; None for programs that read standard input."""
    cases: tuple[Case, ...] = ()
    context: str = ""
    """Code before the candidate's (a signature with its docstring, imports)."""
    test: str = ""
    """Assert-style test; empty if there are cases."""
    tolerance: float | None = None
    """Tolerance between floats; None uses the task kind's default."""
    is_wrapped: bool = False
    """True if every expected value is in a list of one (APPS, TACO), so the inner value is correct too."""


def parse_task(raw: Any, *, place: str, rules: CodeRules = CodeRules()) -> CodeTask:  # noqa: B008
    """Return a row's task; raise DataError naming the place and what is missing or impossible."""
    if isinstance(raw, CodeTask):
        return raw
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError as error:
            raise DataError(
                f"{place}: the code task is not valid JSON: {error}; it starts with {raw[:60]!r}"
            ) from error
    if not isinstance(raw, dict):
        raise DataError(f"{place}: a code task must be an object, not {str(raw)[:80]!r}")
    entry_point = _entry_point(raw, place)
    test = raw.get("test") or "\n".join(map(str, _listed(raw.get("test_list") or ())))
    if test:
        _compiles(test, place, "test")
        context = str(raw.get("prompt") or raw.get("context") or "")
        if not entry_point:
            raise DataError(f"{place}: a task with asserts must name its entry_point")
        return CodeTask(entry_point=entry_point, context=context, test=test)
    cases = _cases(raw, entry_point, place)
    if not cases:
        raise DataError(
            f"{place}: a code task needs cases, inputs and outputs, test or test_list; it has {sorted(raw)}"
        )
    for case in cases:
        _require_passable(case, entry_point, rules, place)
    return CodeTask(
        entry_point=entry_point,
        cases=cases,
        context=str(raw.get("prompt") or raw.get("context") or ""),
        tolerance=_tolerance(raw, place),
        is_wrapped="inputs" in raw and all(isinstance(o, list) and len(o) == 1 for o in raw["outputs"]),
    )


def _entry_point(raw: dict[str, Any], place: str) -> str | None:
    name = raw.get("entry_point") or raw.get("fn_name")
    if not name:
        return None
    if not isinstance(name, str) or not (name := re.sub(r"^Solution(?:\(\))?\.", "", name)).isidentifier():
        raise DataError(f"{place}: entry_point or fn_name must be the name of a function, not {name!r}")
    return name


def _tolerance(raw: dict[str, Any], place: str) -> float | None:
    value = raw.get("tolerance")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise DataError(f"{place}: tolerance must be a number from 0 to below 1, not {value!r}")
    return float(value)


def _require_passable(case: Case, entry_point: str | None, rules: CodeRules, place: str) -> None:
    """Raise DataError for a case whose input cannot be sent or whose result no program can return."""
    limit = OUTPUT_KIB * 1024
    try:
        if entry_point:
            for value in (*case.args, *dict(case.kwargs).values()):
                encode_value(value)
            expected = encode_value(case.expected)
            decode_value(expected)
            size = len(json.dumps(expected))
        else:
            case.stdin.encode()
            size = len(case.stdout.strip().encode())
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: no program can pass a case of this task: {error}") from error
    if size > limit:
        raise DataError(
            f"{place}: no program can pass a case of this task: the expected result has {size} bytes, but a "
            f"program may write {limit}; leave the row out"
        )


def _cases(raw: dict[str, Any], entry_point: str | None, place: str) -> tuple[Case, ...]:
    if "inputs" in raw:
        inputs, outputs = raw["inputs"], raw.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise DataError(f"{place}: inputs and outputs must be lists of the same length")
        if entry_point:
            return _json_lines(inputs, outputs) or tuple(
                Case(args=tuple(map(_with_integer_keys, _listed(i))), expected=o)
                for i, o in zip(inputs, outputs, strict=True)
            )
        return tuple(Case(stdin=_text(i), stdout=_text(o)) for i, o in zip(inputs, outputs, strict=True))
    return tuple(_case(case, entry_point, place) for case in raw.get("cases") or ())


def _case(case: Any, entry_point: str | None, place: str) -> Case:
    required = ("args", "expected") if entry_point else ("stdin", "stdout")
    if not isinstance(case, dict) or any(name not in case for name in required):
        raise DataError(f"{place}: a case needs {' and '.join(required)}; this one is {str(case)[:80]!r}")
    if not entry_point:
        return Case(stdin=_text(case["stdin"]), stdout=_text(case["stdout"]))
    kwargs = case.get("kwargs") or {}
    return Case(args=tuple(_listed(case["args"])), kwargs=tuple(kwargs.items()), expected=case["expected"])


def _json_lines(inputs: list[Any], outputs: list[Any]) -> tuple[Case, ...]:
    """Return cases from JSON texts, one argument per line; empty if any of them is something else."""
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        return ()
    try:
        return tuple(
            Case(args=tuple(map(json.loads, text.strip().split("\n"))), expected=json.loads(output))
            for text, output in zip(inputs, outputs, strict=True)
        )
    except ValueError:
        return ()


def _with_integer_keys(value: Any) -> Any:
    """Return an argument as in APPS' harness: keys that JSON made text are integers again."""
    if isinstance(value, dict) and value and all(re.fullmatch("-?[0-9]{1,300}", key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _compiles(source: str, place: str, label: str) -> None:
    try:
        compile(source, label, "exec")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{place}: the task's {label} does not compile: {error}") from error
