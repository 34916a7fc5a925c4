"""Test runs: the exchange between test and candidate, and the harm that a returned value can do."""

from typing import Any

import psutil
import pytest

from mrl.errors import RewardError
from mrl.processes.own_time import Allowance, OwnTimeClock
from mrl.rewards.code import run_tests
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.program import program_in
from mrl.rewards.code.program_tests import TestRun
from mrl.rewards.code.tasks import CodeTask, parse_task
from tests.support.programs import misjudged
from tests.support.verifier_cases.case import take
from tests.support.verifier_cases.code import GENERATORS
from tests.support.verifier_cases.code.exceptions import exceptions

PATIENT = CodeRules(seconds=60.0, cpu_seconds=60.0)


@pytest.mark.parametrize("count", [400, pytest.param(1500, marks=pytest.mark.slow)])
def test_generated_exceptions_never_end_a_test_early(count: int) -> None:
    assert misjudged(exceptions, count) == []


def asserts(body: str) -> CodeTask:
    return parse_task({"entry_point": "f", "test": f"def check(candidate):\n    {body}\n"}, place="x")


HUGE = "def f(x):\n    return 10 ** 15_000"
ROWS = "def f(x):\n    return [[1]]"
NESTED = "def f(x):\n    v = []\n    for _ in range(90): v = [v]\n    return v"
HEAVY = {
    "a power": (HUGE, "assert 3 ** candidate(1) % 7 == 1", "time limit: "),
    "hidden": (HUGE, "try:\n        assert sum(range(candidate(1)))\n    except BaseException: pass",
        "time limit: "),
    "that much text": (HUGE, "assert ' ' * (candidate(1) % 2**40 + 2**33)", "memory limit: in the test"),
    "digits": (HUGE, "assert str(candidate(1)) == '1'", "wrong: the test ended with ValueError"),
    "float": (HUGE, "assert float(candidate(1)) == 1.0", "wrong: the test ended with OverflowError"),
    "elements": (ROWS, "assert set(candidate(1)) == {1}", "wrong: the test ended with TypeError"),
    "deeper": (NESTED, "v = candidate(1)\n    for _ in range(20): v = [v]\n    candidate(v)",
        "wrong: the test ended with ValueError"),
    "a crash": (ROWS, "import os\n    candidate(1)\n    os.kill(os.getpid(), 11)",
        "wrong: the test of what was returned ended its process with status -11"),
}  # fmt: skip
"""A trusted test's use of a plain value, and the reason that the program gets."""


@pytest.mark.parametrize("name", HEAVY)
def test_what_a_test_does_with_a_value_is_the_programs(name: str) -> None:
    program, body, reason = HEAVY[name]
    rules = CodeRules(seconds=0.5, cpu_seconds=0.5) if "time" in reason else PATIENT
    verdict = verify_program(program, asserts(body), rules)
    assert verdict.value == 0.0
    assert verdict.reason.startswith(reason), verdict.reason


def test_a_test_that_outruns_its_observer_ends_by_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the processor time may run out before the observer looks."""
    monkeypatch.setattr(OwnTimeClock, "look", lambda clock: True)
    program, body, _ = HEAVY["a power"]
    verdict = verify_program(program, asserts(body), CodeRules(seconds=1.0, cpu_seconds=1.0))
    assert (verdict.value, verdict.reason) == (0.0, "time limit: CPU time of the test of what was returned")


def test_a_comparison_that_raises_is_the_programs() -> None:
    task = parse_task({"entry_point": "f", "cases": [{"args": [1], "expected": {"1": 1}}]}, place="x")
    verdict = verify_program("def f(x):\n    return {10 ** 5000: 1}", task, PATIENT)
    assert verdict.value == 0.0
    assert verdict.reason == "wrong: returned a value that cannot be compared (ValueError)"


@pytest.mark.parametrize(
    "body",
    ["pass", "assert False", "candidate(1)\n    import nothing_of_that_name", "candidate(lambda: 1)",
     "import os\n    os._exit(0)", "import os\n    candidate(1)\n    os._exit(3)"],
)  # fmt: skip
def test_a_task_that_cannot_be_judged_is_no_verdict(body: str) -> None:
    with pytest.raises(RewardError, match="code verifier"):
        verify_program("def f(x):\n    return x", asserts(body), PATIENT)


@pytest.mark.parametrize(
    ("program", "body"),
    [
        ("def f(x):\n    return {frozenset({x})}",
         "assert {hash(s) for s in candidate(1)} == {hash(frozenset({1}))}"),
        ("import collections\nf = collections.Counter", "assert candidate('aa') == {'a': 2}"),
        ("def f(x):\n    return {7 ** 9000}", "assert 7 ** 9000 in candidate(1)"),
        ("def f(x):\n    return x / 3", "import numpy\n    assert numpy.isclose(candidate(1), 1 / 3)"),
    ],
)  # fmt: skip
def test_values_are_what_the_tests_own_equality_says(program: str, body: str) -> None:
    verdict = verify_program(program, asserts(body), PATIENT)
    assert verdict.value == 1.0, verdict.reason


def test_a_signature_without_a_body_is_context() -> None:
    raw = {"entry_point": "f", "prompt": "def f(x):", "test": "assert f(2) == 3"}
    assert verify_program("    return x + 1", parse_task(raw, place="x"), PATIENT).value == 1.0


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_generated_programs_in_the_sandbox(count: int) -> None:
    """A few cases of every generator; the tests above run the others without a sandbox."""
    for generator in GENERATORS.values():
        for case in take(generator, count, seed=1):
            task = parse_task(case.ground_truth, place="generated")
            program = program_in(case.response, task)
            assert program is not None or not case.right
            if program is not None:
                verdict = verify_program(program, task, PATIENT)
                assert verdict.value == float(case.right), (case.label, verdict.reason)


FORGED = """
import __main__
def f(x):
    __main__.told = lambda error: {answer}
    1 / 0
"""


@pytest.mark.parametrize(
    "answer",
    [
        "{'raised': 'E', 'bases': 5}",
        "{'raised': 'E', 'bases': [['StopIteration'], 'StopIteration'], 'text': {}}",
        "{'raised': ['ValueError'], 'bases': ['Exception', 'BaseException']}", "{'value': {'d': 5}}", "{}",
    ],
)  # fmt: skip
def test_a_forged_answer_is_no_exception_of_the_test(answer: str) -> None:
    """The candidate controls the runner, so an exception that it reports is only data."""
    body = "got = list(map(candidate, [1, 2]))\n    assert got in ([], [1])"
    assert verify_program(FORGED.replace("{answer}", answer), asserts(body), PATIENT).value == 0.0


class Gone:
    """Ends at its first call."""

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        raise CandidateEnded(Outcome.FORBIDDEN, "at the first call")

    def finish(self) -> None:
        return None


def test_processes_end_with_their_exams() -> None:
    before = {child.pid for child in psutil.Process().children()}
    for _ in range(3):
        result = run_tests.run_in_process(
            TestRun(asserts("candidate(1)")), Gone(), PATIENT, Allowance.of(60.0)
        )  # type: ignore[arg-type]
        assert result == (0, Outcome.FORBIDDEN, "at the first call")
    assert {child.pid for child in psutil.Process().children()} <= before
