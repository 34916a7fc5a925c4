"""Verifier's side of a test run: forwards its calls to the candidate and ends its process at the deadline."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mrl.errors import RewardError
from mrl.processes.forked_child import ForkedChild
from mrl.processes.own_time import Allowance, OwnTimeClock
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.program_tests import MAX_QUESTION_BYTES, Channel, TestRun

_TEST = "the test of what was returned"


def run_in_process(
    exam: TestRun, session: CandidateProcess, rules: CodeRules, allowance: Allowance
) -> tuple[int, Outcome, str]:
    """Execute a test run in its own process.

    Args:
        session: The candidate, which replies to the calls.
        allowance: Budget of own time. The limit is that of a candidate process, which counts separately.

    Returns:
        (cases passed, outcome, reason).

    Raises:
        Starved: The machine gave too little CPU time to tell.
        RewardError: The task's test is at fault.
    """
    passed = 0
    try:
        with _TestRun(exam, rules, allowance) as run:
            while True:
                message = run.next()
                passed = int(message["passed"])
                if "call" not in message:
                    break
                run.answer(session.call(message["call"]))
        session.finish()
        return passed, Outcome(message["outcome"]), message["reason"]
    except CandidateEnded as ended:
        # Earlier replies of a process that cheats are not trusted either: it passes no case.
        return 0 if ended.outcome is Outcome.WRONG else passed, ended.outcome, ended.reason


class _TestRun:
    """Test run in progress. The `with` block ends its process and subtracts its time from the allowance."""

    def __init__(self, exam: TestRun, rules: CodeRules, allowance: Allowance) -> None:
        self._allowance = allowance
        self._seconds = min(rules.seconds, allowance.left)
        self._num_answers = 0
        self._exam, self._rules = exam, rules

    def __enter__(self) -> _TestRun:
        self._child = ForkedChild(self._run, limit=2 * MAX_QUESTION_BYTES)
        self._own = OwnTimeClock(self._child.pid, limit=self._seconds)
        self._has_ended = False
        return self

    def __exit__(self, *error: object) -> None:
        self._own.look()
        self._allowance.left -= self._own.seconds
        if not self._has_ended:
            self._child.reap()

    def next(self) -> dict[str, Any]:
        """Return a call for the candidate, or the result.

        Raises:
            CandidateEnded: The test used up its time or died because of a returned value.
            RewardError: The test failed without the candidate.
        """
        try:
            message = self._child.next_reply(self._own, self._allowance, self._seconds)
        except TimeoutError:
            if self._num_answers:
                reason = f"no end of {_TEST} within {self._seconds:g} s"
                raise CandidateEnded(Outcome.TIME_LIMIT, reason) from None
            raise RewardError("code verifier: the task's test never called the candidate in time") from None
        except EOFError:
            self._died()
        if "failed" in message:
            raise RewardError(f"code verifier: {message['failed']}")
        return message

    def answer(self, reply: dict[str, Any]) -> None:
        """Send the candidate's reply."""
        self._num_answers += 1
        self._child.send_bytes(json.dumps(reply).encode())

    def _died(self) -> NoReturn:
        status, self._has_ended = self._child.reap(), True
        if not self._num_answers or status >= 0 or status == -signal.SIGKILL:
            raise RewardError(f"code verifier: the task's test ended with status {status}")
        if status == -signal.SIGXCPU:
            raise CandidateEnded(Outcome.TIME_LIMIT, f"CPU time of {_TEST}")
        raise CandidateEnded(Outcome.WRONG, f"{_TEST} ended its process with status {status}")

    def _run(self, requests: int, replies: int) -> None:
        """Close all other files and execute the test run, in the child."""
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        first, second = sorted((requests, replies))
        os.closerange(3, first)
        os.closerange(first + 1, second)
        os.closerange(second + 1, 2**16)
        with os.fdopen(requests, "rb") as answers, os.fdopen(replies, "wb") as questions:
            channel = Channel(answers, questions)
            try:
                _limit(self._rules.memory_mib * 2**20, math.ceil(self._seconds) + 1)
                self._exam.run(channel)
            except MemoryError:
                channel.conclude(Outcome.MEMORY_LIMIT, "in the comparison, with the returned values")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Limit memory beyond the interpreter's, and CPU time. The higher hard limit lets SIGXCPU end the
    process, which tells the reason; an equal one would send SIGKILL."""
    status = Path("/proc/self/status").read_text()
    limit = int(status.partition("VmData:")[2].split()[0]) * 1024 + memory_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 2))
