"""Code verifier: run a program in the sandbox and compare its results with the task's.

Four parties: the verifier (here; it forwards calls and replies without reading them), the runner inside the
boundary, the candidate, and the test run (`mrl.rewards.code.program_tests`): a process that has the expected
values and asserts, runs no candidate code, and is killed if a value makes it take too long.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import time
import zlib
from collections.abc import Sequence

from mrl.processes.own_time import Allowance
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.compare_output import same_output
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.program import program_in
from mrl.rewards.code.program_tests import TestRun, completed
from mrl.rewards.code.run_tests import run_in_process
from mrl.rewards.code.sandbox import find_sandbox
from mrl.rewards.code.tasks import Case, CodeTask
from mrl.rewards.contract import RewardRequest, rejected, scored
from mrl.samples import Verdict

_log = logging.getLogger(__name__)

NAME = "code"
VERSION = "2"
MAX_PROGRAM_BYTES = 256 * 1024

CASES_PER_PROCESS = 16
"""Cases of a function-call task that share one process."""


def verify_program(
    program: str,
    task: CodeTask,
    rules: CodeRules = CodeRules(),  # noqa: B008
    *,
    seconds: float = 60.0,
) -> Verdict:
    """Verify one program against a task; `seconds` bounds the own time of all its processes together.

    Raises:
        Starved: The machine gave too little CPU time to tell.
        RewardError: The sandbox cannot be set up; nothing runs without it.
    """
    start = time.monotonic()
    source = _with_context(task.context, program) if task.context else program
    if len(source.encode("utf-8", "replace")) > MAX_PROGRAM_BYTES:
        verdict = rejected(f"program larger than {MAX_PROGRAM_BYTES} bytes")
    else:
        source = source.encode("utf-8", "replace").decode()
        run = _Run(source, task, rules, Allowance.of(seconds))
        verdict = run.asserts() if task.test else run.cases()
    return dataclasses.replace(verdict, verifier=NAME, version=VERSION, seconds=time.monotonic() - start)


def _with_context(context: str, program: str) -> str:
    """Return the task's code and the program after it; `completed` ends the code unless a body follows."""
    is_body = bool(re.match(r"\s*\n[ \t]+\S|[ \t]+\S|\s*$", program))
    return (context if is_body else completed(context)) + "\n" + program


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    source: str
    task: CodeTask
    rules: CodeRules
    allowance: Allowance

    def session(self) -> CandidateProcess:
        if self.allowance.left <= 0:
            raise CandidateEnded(Outcome.TIME_LIMIT, "all its processes together")
        return CandidateProcess(find_sandbox(), self.rules, self.allowance)

    def asserts(self) -> Verdict:
        """Run the data set's own test."""
        _, outcome, reason = self._examined(TestRun(self.task))
        return _verdict(outcome, reason, float(outcome is Outcome.ACCEPTED))

    def cases(self) -> Verdict:
        """Run all cases in an order that depends on the program, which thus cannot tell its case."""
        cases = list(self.task.cases)
        random.Random(zlib.crc32(self.source.encode())).shuffle(cases)
        size = CASES_PER_PROCESS if self.task.entry_point else 1
        passed = 0
        first: tuple[Outcome, str] | None = None
        for start in range(0, len(cases), size):
            num_passed, outcome, reason = self._process(cases[start : start + size])
            passed += num_passed
            if outcome is not Outcome.ACCEPTED:
                first = first or (outcome, reason)
                if not self.rules.partial:
                    break
        outcome, reason = first or (Outcome.ACCEPTED, f"{len(cases)} cases")
        value = passed / len(cases) if self.rules.partial else float(first is None)
        return _verdict(outcome, reason, value)

    def _process(self, cases: Sequence[Case]) -> tuple[int, Outcome, str]:
        """Run cases in one fresh process; return (cases passed, outcome and reason of the first failure)."""
        if self.task.entry_point:
            return self._examined(
                TestRun(dataclasses.replace(self.task, cases=tuple(cases)), self.rules.partial)
            )
        try:
            with self.session() as session:
                return self._stdin_case(session, cases[0])
        except CandidateEnded as ended:
            return 0, ended.outcome, ended.reason

    def _examined(self, exam: TestRun) -> tuple[int, Outcome, str]:
        """Run a test run on one fresh process; return (cases passed, outcome, reason)."""
        try:
            with self.session() as session:
                session.load(self.source, self.task.entry_point or "")
                return run_in_process(exam, session, self.rules, self.allowance)
        except CandidateEnded as ended:
            return 0, ended.outcome, ended.reason

    def _stdin_case(self, session: CandidateProcess, case: Case) -> tuple[int, Outcome, str]:
        written = session.run_as_main(self.source, case.stdin).decode("utf-8", "replace")
        is_correct = same_output(written, case.stdout, self.task.tolerance)
        return (1, Outcome.ACCEPTED, "") if is_correct else (0, Outcome.WRONG, "another output than expected")


def _verdict(outcome: Outcome, reason: str, value: float) -> Verdict:
    verdict = scored(value, f"{outcome.value}: {reason}" if reason else outcome.value)
    return dataclasses.replace(verdict, parts={f"code.{outcome.value.replace(' ', '_')}": 1.0})


class CodeVerifier:
    """Verifier of the program in a response."""

    name, version = NAME, VERSION

    def __init__(self, rules: CodeRules) -> None:
        self._rules = rules
        find_sandbox()  # fail at start-up, not at the first sample

    async def score(self, request: RewardRequest) -> Verdict:
        program = program_in(request.visible, request.ground_truth)
        if program is None:
            return scored(0.0, "no program in the response")
        return verify_program(program, request.ground_truth, self._rules, seconds=request.deadline_seconds)
