"""Test run: a task's test or cases on a candidate's return values. Only this code reads values of a policy.

It runs in a process that is killed at its deadline (`mrl.rewards.code.run_tests`), so that a value that makes
the test hang, fill the memory or crash costs only its own sample. A candidate's exception reaches the test
only if the test names its type, and never as one that ends a loop in Python; any other ends the run uncaught.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn

from mrl.processes.framing import frame, read_frame
from mrl.rewards.code.outcome import Outcome
from mrl.rewards.code.tagged_values import ForeignValue, decode_value, encode_value, same
from mrl.rewards.code.tasks import Case, CodeTask

MAX_QUESTION_BYTES = 64 * 2**20
_TOLERANCE = 1e-6
"""Default relative tolerance between floats."""
_Exceptions = Mapping[str, type[Exception]]
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
_BUILT_IN: _Exceptions = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Channel:
    """Connection to the candidate over two pipes."""

    def __init__(self, answers: BinaryIO, questions: BinaryIO) -> None:
        self._answers, self._questions = answers, questions
        self.passed = 0
        """Number of cases passed so far."""

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one encoded call and return the encoded reply."""
        self._send({"call": question})
        answer = read_frame(self._answers)
        if answer is None:
            os._exit(0)
        return json.loads(answer)

    def conclude(self, outcome: Outcome, reason: str = "") -> NoReturn:
        """Send the result and end this process, whatever the test would do next."""
        self._send({"outcome": outcome.value, "reason": reason[:500]})
        os._exit(0)

    def fail(self, reason: str) -> NoReturn:
        """End this process without a result: the task, not the candidate, is at fault."""
        self._send({"failed": reason[:500]})
        os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message | {"passed": self.passed}).encode()
        if len(data) > MAX_QUESTION_BYTES:
            self.conclude(Outcome.WRONG, "the test's next call with a returned value is too large")
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(frame(data))
            self._questions.flush()


@dataclasses.dataclass(frozen=True, slots=True)
class TestRun:
    """Test run of one process of a candidate."""

    task: CodeTask
    """The task, with the cases of this run."""
    partial: bool = False
    """Continue after a failed case."""

    def run(self, candidate: Channel) -> NoReturn:
        """Run the test or the cases and send the result."""
        if self.task.test:
            _test(self.task, candidate)
        _cases(self, candidate)


class Raised(Exception):
    """The candidate's function raised."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__()
        self.name = str(answer.get("raised"))[:60]
        bases = answer.get("bases")
        self.bases = [str(name) for name in bases] if isinstance(bases, list) else []
        """Names of the exception's type and its bases, nearest first."""
        self.text = str(answer.get("text") or "")


def _cases(exam: TestRun, candidate: Channel) -> NoReturn:
    first: tuple[Outcome, str] | None = None
    for case in exam.task.cases:
        fault = _fault(case, exam.task, candidate)
        candidate.passed += fault is None
        first = first or fault
        if fault and not exam.partial:
            break
    candidate.conclude(*(first or (Outcome.ACCEPTED, "")))


def _fault(case: Case, task: CodeTask, candidate: Channel) -> tuple[Outcome, str] | None:
    question = _question(case.args, dict(case.kwargs))
    tolerance = _TOLERANCE if task.tolerance is None else task.tolerance
    accepted = [case.expected, *case.expected] if task.is_wrapped else [case.expected]
    try:
        value = _value(candidate.call(question))
        is_correct = any(same(value, expected, tolerance=tolerance) for expected in accepted)
    except Raised as raised:
        return Outcome.RUNTIME_ERROR, f"raised {raised.name}"
    except ForeignValue as error:
        return Outcome.WRONG, f"returned {error}"
    except Exception as error:
        return Outcome.WRONG, f"returned a value that cannot be compared ({type(error).__name__})"
    return None if is_correct else (Outcome.WRONG, "another value than expected")


def _test(task: CodeTask, candidate: Channel) -> NoReturn:
    """Execute the trusted test with a proxy for the candidate."""
    names: dict[str, Any] = {"__name__": "test"}
    proxy = _Proxy(candidate)
    try:
        context = completed(task.context)
        exec(compile(context, "context", "exec"), names)
        proxy.known = {**_BUILT_IN, **_exceptions_in(names)}
        proxy.expected = _named(context + "\n" + task.test, proxy.known)
        names[task.entry_point or ""] = names["candidate"] = proxy.function()
        exec(compile(task.test, "test", "exec"), names)
        if "check" in names:
            names["check"](names["candidate"])
    except BaseException as error:
        _ended(error, proxy, candidate)
    if not proxy.num_calls:
        candidate.fail("the task's test never calls the candidate")
    candidate.conclude(Outcome.ACCEPTED, "the test passed")


def _ended(error: BaseException, proxy: _Proxy, candidate: Channel) -> NoReturn:
    """Send the result that an uncaught exception of the test implies."""
    if not proxy.num_calls or isinstance(error, ImportError):
        candidate.fail(f"the task's test ended with {type(error).__name__}: {str(error)[:200]}")
    if error is proxy.crossed:
        candidate.conclude(Outcome.RUNTIME_ERROR, f"raised {proxy.last_raised}")
    if isinstance(error, AssertionError):
        candidate.conclude(Outcome.WRONG, "an assertion failed")
    if isinstance(error, MemoryError):
        candidate.conclude(Outcome.MEMORY_LIMIT, "in the test, with the returned values")
    candidate.conclude(Outcome.WRONG, f"the test ended with {type(error).__name__}")


class _Proxy:
    """Proxy that the test calls instead of the candidate."""

    def __init__(self, candidate: Channel) -> None:
        self._candidate = candidate
        self.known: _Exceptions = {}
        """Exceptions that the test could see."""
        self.expected: tuple[type[Exception], ...] = ()
        """Exceptions that the test names and thus may see."""
        self.num_calls = 0
        self.crossed: Exception | None = None
        """Last exception that the test saw."""
        self.last_raised = ""

    def function(self) -> Callable[..., Any]:
        def candidate(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        return candidate

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            question = _question(args, kwargs)
        except TypeError as error:
            self._candidate.fail(str(error))
        self.num_calls += 1
        try:
            return _value(self._candidate.call(question))
        except ForeignValue as error:
            self._candidate.conclude(Outcome.WRONG, f"returned {error}")
        except Raised as raised:
            self.last_raised = raised.name
            self.crossed = _crossing(raised, self.known, self.expected)
        except Exception as error:
            self._candidate.conclude(
                Outcome.WRONG, f"returned a value that cannot be read ({type(error).__name__})"
            )
        if self.crossed is None:
            self._candidate.conclude(Outcome.RUNTIME_ERROR, f"raised {self.last_raised}")
        raise self.crossed


def _question(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call as data; raise TypeError for an argument of another type."""
    named = {name: encode_value(value) for name, value in kwargs.items()}
    return {"args": [encode_value(value) for value in args], "kwargs": named}


def _value(answer: Mapping[str, Any]) -> Any:
    """Return a call's value; raise Raised or ForeignValue if it has none."""
    if "raised" in answer:
        raise Raised(answer)
    return decode_value(answer.get("value"))


def _crossing(raised: Raised, known: _Exceptions, expected: tuple[type[Exception], ...]) -> Exception | None:
    """Return the exception that the test sees, or None."""
    for kind in (known[name] for name in raised.bases if name in known):
        if issubclass(kind, _ENDS_OF_LOOPS):  # as PEP 479 has it for generators
            kind = RuntimeError
        if not issubclass(kind, expected):
            return None
        try:
            return kind(raised.text)
        except TypeError:  # it needs more than a text: try the next base
            continue
    return None


def _named(source: str, known: _Exceptions) -> tuple[type[Exception], ...]:
    """Return the exceptions that a source names; all if it has a bare `except`."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    bare = any(isinstance(node, ast.ExceptHandler) and node.type is None for node in nodes)
    if bare or "BaseException" in names:
        return (Exception,)
    return tuple(known[name] for name in names if name in known)


def _exceptions_in(names: Mapping[str, Any]) -> _Exceptions:
    return {
        name: kind for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, Exception)
    }


def completed(context: str) -> str:
    """Return the code before the candidate's, with `pass` added if it ends with a signature."""
    try:
        ast.parse(context)
    except SyntaxError:
        last = context.rstrip().rpartition("\n")[2]
        return context.rstrip() + "\n" + last[: len(last) - len(last.lstrip())] + "    pass"
    return context
