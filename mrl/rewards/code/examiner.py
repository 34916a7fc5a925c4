"""The verifier's side of exams: asks the candidate what an exam wants to know, and ends the exam's process when its time is over."""

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
from mrl.processes.own_time import Allowance, OwnTime
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.exam import MAX_QUESTION_BYTES, Channel, Exam
from mrl.rewards.code.outcome import CandidateEnded, Outcome

_TEST = "the test of what was returned"


def examine(
    exam: Exam, session: CandidateProcess, rules: CodeRules, allowance: Allowance
) -> tuple[int, Outcome, str]:
    """Have an exam sat in a process of its own.

    Args:
        session: The candidate, which answers the exam's questions.
        allowance: What the exam's own time is taken from. It may take as long as a process of the candidate, whose time does not
            count here.

    Returns:
        Cases passed, outcome and reason.

    Raises:
        Starved: The machine leaves it open.
        RewardError: The task's test is at fault.
    """
    passed = 0
    try:
        with _Sitting(exam, rules, allowance) as sitting:
            while True:
                message = sitting.next()
                passed = int(message["passed"])
                if "call" not in message:
                    break
                sitting.answer(session.call(message["call"]))
        session.finish()
        return passed, Outcome(message["outcome"]), message["reason"]
    except CandidateEnded as ended:
        # Replies before a breach are not believed either: a process that cheats passes nothing.
        return 0 if ended.outcome is Outcome.WRONG else passed, ended.outcome, ended.reason


class _Sitting:
    """An exam that is sat. Leaving the `with` block ends its process, and takes its time from the allowance."""

    def __init__(self, exam: Exam, rules: CodeRules, allowance: Allowance) -> None:
        self._allowance = allowance
        self._seconds = min(rules.seconds, allowance.left)
        self._num_answers = 0
        self._exam, self._rules = exam, rules

    def __enter__(self) -> _Sitting:
        self._child = ForkedChild(self._sit, limit=2 * MAX_QUESTION_BYTES)
        self._own = OwnTime(self._child.pid, limit=self._seconds)
        self._has_ended = False
        return self

    def __exit__(self, *error: object) -> None:
        self._own.look()
        self._allowance.left -= self._own.seconds
        if not self._has_ended:
            self._child.reap()

    def next(self) -> dict[str, Any]:
        """Return a question for the candidate, or the result. Raises CandidateEnded if the test used up its time or died of what was
        returned, and RewardError if the candidate had no part in it."""
        try:
            message = self._child.next_reply(self._own, self._allowance, self._seconds)
        except TimeoutError:
            if self._num_answers:
                reason = f"no end of {_TEST} within {self._seconds:g} s"
                raise CandidateEnded(Outcome.TIME_LIMIT, reason) from None
            raise RewardError("code verifier: the task's test does not come to call the candidate") from None
        except EOFError:
            self._died()
        if "failed" in message:
            raise RewardError(f"code verifier: {message['failed']}")
        return message

    def answer(self, reply: dict[str, Any]) -> None:
        """Tell what the candidate answered."""
        self._num_answers += 1
        self._child.send_bytes(json.dumps(reply).encode())

    def _died(self) -> NoReturn:
        status, self._has_ended = self._child.reap(), True
        if not self._num_answers or status >= 0 or status == -signal.SIGKILL:
            raise RewardError(f"code verifier: the task's test ended with status {status}")
        if status == -signal.SIGXCPU:
            raise CandidateEnded(Outcome.TIME_LIMIT, f"processor time of {_TEST}")
        raise CandidateEnded(Outcome.WRONG, f"{_TEST} ended its process with status {status}")

    def _sit(self, requests: int, replies: int) -> None:
        """In the child, which has none of its parent's other files."""
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        first, second = sorted((requests, replies))
        os.closerange(3, first)
        os.closerange(first + 1, second)
        os.closerange(second + 1, 2**16)
        with os.fdopen(requests, "rb") as answers, os.fdopen(replies, "wb") as questions:
            channel = Channel(answers, questions)
            try:
                _limit(self._rules.memory_mib * 2**20, math.ceil(self._seconds) + 1)
                self._exam.sit(channel)
            except MemoryError:
                channel.conclude(Outcome.MEMORY_LIMIT, "in the comparison, with what was returned")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Memory beyond what the interpreter has, and processor time: at its end SIGXCPU says why, which an equal hard limit would
    make SIGKILL."""
    status = Path("/proc/self/status").read_text()
    limit = int(status.partition("VmData:")[2].split()[0]) * 1024 + memory_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 2))
