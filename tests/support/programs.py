"""Run our own generated programs in this process, as sandbox and test run would."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from mrl.rewards.code import runner
from mrl.rewards.code.compare_output import same_output
from mrl.rewards.code.outcome import Outcome
from mrl.rewards.code.program import program_in
from mrl.rewards.code.program_tests import TestRun
from mrl.rewards.code.tasks import CodeTask, parse_task
from tests.support.verifier_cases.case import Generator, take


def passes(program: str | None, task: CodeTask) -> bool | None:
    """Return True if a harmless program passes its task's tests; None if they give no verdict."""
    if program is None:
        return False
    source = f"{task.context}\n{program}"
    with contextlib.redirect_stdout(io.StringIO()):
        if task.entry_point is None:
            return all(same_output(_output(source, case.stdin), case.stdout) for case in task.cases)
        try:
            names: dict[str, Any] = {"__name__": "candidate"}
            exec(source, names)
            candidate = _Here(names[task.entry_point])
        except Exception:
            return False
        with contextlib.suppress(_Concluded, Exception):
            TestRun(task).run(candidate)
        return candidate.result and candidate.result is Outcome.ACCEPTED


def misjudged(generator: Generator, count: int) -> list[str]:
    """Return the labels of generated responses whose program gets a wrong verdict or none."""
    wrong = set()
    for case in take(generator, count):
        task = parse_task(case.ground_truth, place="generated")
        if passes(program_in(case.response, task), task) is not case.right:
            wrong.add(case.label)
    return sorted(wrong)


class _Concluded(BaseException):
    pass


class _Here:
    """A candidate whose values cross as in the sandbox."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.passed = 0
        self.result: Outcome | None = None

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(self._answer(json.loads(json.dumps(question)))))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        arguments = [runner.decode_tagged(value) for value in question["args"]]
        try:
            return {"value": runner.encode_tagged(self._function(*arguments))}
        except BaseException as error:
            try:
                return runner.error_message(error)
            except ZeroDivisionError:  # a hostile exception ends the runner
                self.conclude(Outcome.RUNTIME_ERROR)

    def conclude(self, outcome: Outcome, reason: str = "") -> NoReturn:
        self.result = self.result or outcome
        raise _Concluded

    def fail(self, reason: str) -> NoReturn:
        raise _Concluded


def _output(source: str, text: str) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written), _standard_input(text), contextlib.suppress(Exception):
        exec(source, {"__name__": "__main__"})
    return written.getvalue()


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = before
