"""Programs of our own generators, run in this process: what the sandbox does for them, without a boundary."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

from mrl.rewards.code import values
from mrl.rewards.code.runner import encode
from mrl.rewards.code.tasks import CodeTask


def passes(program: str | None, task: CodeTask) -> bool:
    """Whether a harmless program does what its task asks, by the verifier's own comparison."""
    if program is None:
        return False
    try:
        return _passes(f"{task.context}\n{program}", task)
    except Exception:
        return False


def _passes(source: str, task: CodeTask) -> bool:
    if task.entry_point is None:
        return all(_output(source, case.stdin).split() == case.stdout.split() for case in task.cases)
    names: dict[str, Any] = {"__name__": "candidate"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(source, names)
        function = names[task.entry_point]
        if task.test:
            exec(task.test, names)
            names["check"](function)
        return all(
            values.same(_crossed(function(*case.args)), case.expected, tolerance=task.tolerance)
            for case in task.cases
        )


def _crossed(value: Any) -> Any:
    return values.decode(json.loads(json.dumps(encode(value))))


def _output(source: str, text: str) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written), _standard_input(text):
        exec(source, {"__name__": "__main__"})
    return written.getvalue()


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = before
