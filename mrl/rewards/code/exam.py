"""A task's own test, or its cases, on what a candidate answers: the part that reads a policy's values.

Runs in a process that is killed when its time is over (`mrl.rewards.code.examiner`), so that a value on which the
test hangs, fills the memory or crashes costs its own sample and nothing else. An exception of the candidate
reaches the test only where the test names its kind, and never as one that Python itself takes for the end of a
loop; any other concludes the exam, and no `except` of the test can swallow that.
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
"""Relative error allowed between floats where the task names none."""
_Exceptions = Mapping[str, type[Exception]]
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
_BUILT_IN: _Exceptions = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Channel:
    """The candidate, at the other end of two pipes."""

    def __init__(self, answers: BinaryIO, questions: BinaryIO) -> None:
        self._answers, self._questions = answers, questions
        self.passed = 0
        """Cases that were correct so far."""

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one call, both encoded."""
        self._send({"call": question})
        answer = read_frame(self._answers)
        if answer is None:
            os._exit(0)
        return json.loads(answer)

    def conclude(self, outcome: Outcome, reason: str = "") -> NoReturn:
        """End the exam with a result, whatever the test would do next."""
        self._send({"outcome": outcome.value, "reason": reason[:500]})
        os._exit(0)

    def fail(self, reason: str) -> NoReturn:
        """End the exam without a result: the task, not the candidate, is at fault."""
        self._send({"failed": reason[:500]})
        os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message | {"passed": self.passed}).encode()
        if len(data) > MAX_QUESTION_BYTES:
            self.conclude(Outcome.WRONG, "the test made a question of it that is too large")
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(frame(data))
            self._questions.flush()


@dataclasses.dataclass(frozen=True, slots=True)
class Exam:
    """What one process of a candidate is asked."""

    task: CodeTask
    """Of its cases, those that are asked."""
    partial: bool = False
    """A wrong answer does not end it."""

    def sit(self, candidate: Channel) -> NoReturn:
        """Ask the candidate and conclude."""
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
        """Names of the exception's type and those it derives from, nearest first."""
        self.text = str(answer.get("text") or "")


def _cases(exam: Exam, candidate: Channel) -> NoReturn:
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
    wanted = [case.expected, *case.expected] if task.is_wrapped else [case.expected]
    try:
        value = _value(candidate.call(question))
        right = any(same(value, expected, tolerance=tolerance) for expected in wanted)
    except Raised as raised:
        return Outcome.RUNTIME_ERROR, f"raised {raised.name}"
    except ForeignValue as error:
        return Outcome.WRONG, f"returned {error}"
    except Exception as error:
        return Outcome.WRONG, f"returned what cannot be compared ({type(error).__name__})"
    return None if right else (Outcome.WRONG, "another value than expected")


def _test(task: CodeTask, candidate: Channel) -> NoReturn:
    """Execute the trusted test with a proxy in the candidate's place."""
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
    """What an exception that the test let out says."""
    if not proxy.num_calls or isinstance(error, ImportError):
        candidate.fail(f"the task's test ended with {type(error).__name__}: {str(error)[:200]}")
    if error is proxy.crossed:
        candidate.conclude(Outcome.RUNTIME_ERROR, f"raised {proxy.last_raised}")
    if isinstance(error, AssertionError):
        candidate.conclude(Outcome.WRONG, "an assertion failed")
    if isinstance(error, MemoryError):
        candidate.conclude(Outcome.MEMORY_LIMIT, "in the test, with what was returned")
    candidate.conclude(Outcome.WRONG, f"the test ended with {type(error).__name__}")


class _Proxy:
    """What the test calls."""

    def __init__(self, candidate: Channel) -> None:
        self._candidate = candidate
        self.known: _Exceptions = {}
        """Exceptions that can cross."""
        self.expected: tuple[type[Exception], ...] = ()
        """Those that may."""
        self.num_calls = 0
        self.crossed: Exception | None = None
        """The last one that did."""
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
            self._candidate.conclude(Outcome.WRONG, f"returned what cannot be read ({type(error).__name__})")
        if self.crossed is None:
            self._candidate.conclude(Outcome.RUNTIME_ERROR, f"raised {self.last_raised}")
        raise self.crossed


def _question(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call as data. Raises TypeError for an argument of a type that cannot cross."""
    named = {name: encode_value(value) for name, value in kwargs.items()}
    return {"args": [encode_value(value) for value in args], "kwargs": named}


def _value(answer: Mapping[str, Any]) -> Any:
    """A call's value. Raises Raised and ForeignValue."""
    if "raised" in answer:
        raise Raised(answer)
    return decode_value(answer.get("value"))


def _crossing(raised: Raised, known: _Exceptions, expected: tuple[type[Exception], ...]) -> Exception | None:
    """The exception that the test sees; None where it sees none."""
    for kind in (known[name] for name in raised.bases if name in known):
        if issubclass(kind, _ENDS_OF_LOOPS):  # as PEP 479 has it for generators
            kind = RuntimeError
        if not issubclass(kind, expected):
            return None
        try:
            return kind(raised.text)
        except TypeError:  # it takes more than a text: the next base will do
            continue
    return None


def _named(source: str, known: _Exceptions) -> tuple[type[Exception], ...]:
    """The exceptions that a source names, all where it has an `except` without a kind."""
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
    """Code before the candidate's, with a body where it ends with a signature."""
    try:
        ast.parse(context)
    except SyntaxError:
        last = context.rstrip().rpartition("\n")[2]
        return context.rstrip() + "\n" + last[: len(last) - len(last.lstrip())] + "    pass"
    return context
