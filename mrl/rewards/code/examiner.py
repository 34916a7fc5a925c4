"""The verifier's side of exams: who asks the candidate what an exam's process wants to know, and ends that
process when its time is over."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
import signal
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mrl.errors import RewardError
from mrl.processes.own_time import Allowance, OwnTime, wait_within
from mrl.processes.start import child_environment, module_words
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.exam import Exam
from mrl.rewards.code.outcome import CandidateEnded, Outcome

_START_SECONDS = 60.0
_TEST = "the test of what was returned"


class Examiner:
    """Has exams sat, each in a process of its own that a small server forks. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def examine(
        self, exam: Exam, session: CandidateProcess, rules: CodeRules, allowance: Allowance
    ) -> tuple[int, Outcome, str]:
        """Cases passed, outcome and reason. The test may take as long as a process of the candidate, its time
        left out.

        Raises Starved, and RewardError where the task's test is at fault.
        """
        passed = 0
        try:
            with self._start(exam, rules, allowance) as sitting:
                while True:
                    said = sitting.next()
                    passed = int(said["passed"])
                    if "call" not in said:
                        break
                    sitting.answer(session.call(said["call"]))
            session.finish()
            return passed, Outcome(said["outcome"]), said["reason"]
        except CandidateEnded as ended:
            # Replies before a breach are not believed either: a process that cheats passes nothing.
            return 0 if ended.outcome is Outcome.WRONG else passed, ended.outcome, ended.reason

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                module_words("mrl.rewards.code.sitting", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )

    def _start(self, exam: Exam, rules: CodeRules, allowance: Allowance) -> _Sitting:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._server.poll() is not None:
                self._control.close()
                self._begin()
            try:
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RewardError(f"code verifier: the processes for tests have ended: {error}") from error
        return _Sitting(Connection(ours.detach()), exam, rules, allowance)


@functools.lru_cache(maxsize=1)
def examiner() -> Examiner:
    """This process' own."""
    return Examiner()


class _Sitting:
    """An exam that is sat. Leaving the `with` block ends its process, and takes its time from the allowance."""

    def __init__(self, connection: Connection, exam: Exam, rules: CodeRules, allowance: Allowance) -> None:
        self._connection = connection
        self._allowance = allowance
        self._seconds = min(rules.seconds, allowance.left)
        self._num_answers = 0
        self._exam = pickle.dumps((exam, rules.memory_mib * 2**20, math.ceil(self._seconds) + 1))

    def __enter__(self) -> _Sitting:
        try:
            if not self._connection.poll(_START_SECONDS):
                raise RewardError("code verifier: no process for a test")
            self._own = OwnTime(int(self._receive()["pid"]), limit=self._seconds)
            self._connection.send_bytes(self._exam)
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._own.look()
        self._allowance.left -= self._own.seconds
        self._connection.close()

    def next(self) -> dict[str, Any]:
        """A question for the candidate, or the result. Raises CandidateEnded where the test used up its time or
        died of what was returned, Starved where the machine leaves it open, and RewardError where the candidate
        had no part in it."""
        self._wait()
        said = self._receive()
        if "failed" in said:
            raise RewardError(f"code verifier: {said['failed']}")
        if "died" in said:
            self._died(int(said["died"]))
        return said

    def answer(self, reply: dict[str, Any]) -> None:
        """Tell what the candidate answered."""
        self._num_answers += 1
        with contextlib.suppress(BrokenPipeError):  # `next` says why
            self._connection.send_bytes(json.dumps(reply).encode())

    def _wait(self) -> None:
        if wait_within(self._own, self._allowance, self._connection.poll, seconds=self._seconds):
            return
        if self._num_answers:
            reason = f"no end of {_TEST} within {self._seconds:g} s"
            raise CandidateEnded(Outcome.TIME_LIMIT, reason)
        raise RewardError("code verifier: the task's test does not come to call the candidate")

    def _receive(self) -> dict[str, Any]:
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RewardError("code verifier: the processes for tests have ended") from error

    def _died(self, status: int) -> NoReturn:
        if not self._num_answers or status >= 0 or status == -signal.SIGKILL:
            raise RewardError(f"code verifier: the task's test ended with status {status}")
        if status == -signal.SIGXCPU:
            raise CandidateEnded(Outcome.TIME_LIMIT, f"processor time of {_TEST}")
        raise CandidateEnded(Outcome.WRONG, f"{_TEST} ended its process with status {status}")
