"""Conversation with a candidate: requests and replies in turn, capped output, a limit of its own time.

consumes      calls of the verifier
produces      undecoded replies, or CandidateEnded with the outcome; Starved if too little CPU leaves it open
waits for     the reply descriptor, standard output and error together, until its own time is used up
never does    trust an exit status or printed text: they only explain a failure
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from typing import Any, NoReturn

from mrl.errors import RewardError
from mrl.processes.framing import BadReply, FrameBuffer, frame, parse_reply
from mrl.processes.own_time import Allowance, OwnTimeClock
from mrl.rewards.code.code_rules import OUTPUT_KIB, CodeRules
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.sandbox import CodeSandbox, SandboxRun

_READY_SECONDS = 30.0
_LAST_SECONDS = 2.0
_RECURSION_PER_MIB = 1024
"""Recursion limit per MiB: a Python call takes at least 1 KiB."""
_SIGSYS_STATUS = 128 + 31


class CandidateProcess:
    """Sandboxed process that runs a program. Use it as a context manager."""

    def __init__(self, boundary: CodeSandbox, rules: CodeRules, allowance: Allowance) -> None:
        """Start the sandbox. The end of the `with` block subtracts the used own time from the allowance."""
        self._boundary = boundary
        self._rules = rules
        self._allowance = allowance
        self._seconds = min(allowance.left, rules.seconds)
        self._run = SandboxRun(boundary, rules)
        process = self._run.process
        assert process.stdin and process.stdout and process.stderr
        self._stdin, self._stdout, self._stderr = (
            s.fileno() for s in (process.stdin, process.stdout, process.stderr)
        )
        for descriptor in (self._stdin, self._stdout, self._stderr, self._run.requests):
            os.set_blocking(descriptor, False)
        self._open_outputs = {self._stdout, self._stderr}
        self._output = {self._stdout: bytearray(), self._stderr: bytearray()}
        self._frames = FrameBuffer(limit=OUTPUT_KIB * 1024 + 64)
        self._replies: list[bytes] = []
        self._reply_open = True
        self._calls = 0
        self._begin()

    def __enter__(self) -> CandidateProcess:
        try:
            self._await_ready()
        except BaseException:
            self._run.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._time.look()
        self._allowance.left -= self._time.seconds
        self._run.__exit__()

    def load(self, program: str, entry_point: str) -> None:
        """Run the program's definitions and find its function; raise CandidateEnded if that fails."""
        self._close_stdin()
        self._send(self._setup(program, entry_point))
        reply = self._receive()
        if reply.get("raised") == "MemoryError":
            self._end(Outcome.MEMORY_LIMIT, f"more than {self._rules.memory_mib} MiB")
        if reply != {"loaded": True}:
            self._end(Outcome.RUNTIME_ERROR, f"the program raised {_name(reply)} while it was loaded")

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one encoded call and return the encoded reply; raise CandidateEnded if the run is over."""
        self._refuse_early()
        self._calls += 1
        self._send({"id": self._calls, **question})
        reply = self._receive()
        if reply.get("id") != self._calls or type(reply.get("id")) is not int:
            self._end(Outcome.WRONG, "a reply to another call")
        if reply.get("raised") == "MemoryError":
            self._end(Outcome.MEMORY_LIMIT, "MemoryError")
        return reply

    def finish(self) -> None:
        """Check after the last call that no reply is left."""
        self._refuse_early()

    def run_as_main(self, program: str, stdin: str) -> bytes:
        """Run a program that reads standard input; return its standard output."""
        self._send(self._setup(program, None))
        left = memoryview(stdin.encode())
        while self._open_outputs:
            left = self._write_some(left)
            self._wait(writing=self._stdin if left else None, reading_replies=False)
        while not select.select([self._run.end], [], [], 0)[0]:
            self._wait(writing=None, reading_replies=False)
        self._check_time()
        if status := self._run.process.wait():
            self._explain(status)
        return bytes(self._output[self._stdout])

    def _begin(self) -> None:
        """Start counting time and CPU use."""
        self._time, self._cpu_before = OwnTimeClock(self._run.process.pid), self._run.cpu_seconds()

    def _setup(self, program: str, entry_point: str | None) -> dict[str, Any]:
        self._begin()
        return {
            "program": program,
            "entry_point": entry_point,
            "limits": self._boundary.rlimits(self._rules),
            "recursion": self._rules.memory_mib * _RECURSION_PER_MIB,
        }

    def _await_ready(self) -> None:
        """Wait for the runner's "ready"; without it the verifier failed, not the candidate."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._replies:
            if time.monotonic() > deadline or not self._reply_open:
                errors = bytes(self._output[self._stderr][-200:])
                raise RewardError(
                    f"code verifier: the sandbox did not start: {errors.decode('utf-8', 'replace')!a}"
                )
            self._select(None, [self._run.replies], deadline - time.monotonic())
        with contextlib.suppress(BadReply):
            if parse_reply(self._replies.pop(0)) == {"ready": True}:
                return
        raise RewardError("code verifier: the sandbox's runner did not report that it is ready")

    def _send(self, message: dict[str, Any]) -> None:
        left = memoryview(frame(json.dumps(message).encode()))
        while left:
            self._wait(writing=self._run.requests, reading_replies=True)
            try:
                left = left[os.write(self._run.requests, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._ended_early()

    def _receive(self) -> dict[str, Any]:
        while not self._replies:
            if not self._reply_open:
                self._ended_early()
            self._wait(writing=None, reading_replies=True)
        self._check_time()
        try:
            return parse_reply(self._replies.pop(0))
        except BadReply:
            self._end(Outcome.WRONG, "a reply that is not valid JSON")

    def _refuse_early(self) -> None:
        while self._reply_open and select.select([self._run.replies], [], [], 0)[0]:
            self._read_replies()
            if self._replies:
                break
        if self._replies:
            self._end(Outcome.WRONG, "a reply without a call")

    def _wait(self, *, writing: int | None, reading_replies: bool) -> None:
        """Read available data; return at the latest when the time must be checked again."""
        self._check_time()
        replies = [self._run.replies] if reading_replies and self._reply_open else []
        ends = [] if self._open_outputs else [self._run.end]
        self._select(writing, [*replies, *ends], self._time.pause)

    def _check_time(self) -> None:
        """Raise CandidateEnded if the run used up its time, Starved if too little CPU leaves that open."""
        limit = min(self._seconds, self._rules.cpu_seconds)
        if self._time.pause and self._time.waited < limit:
            return
        self._time.look()
        if self._has_used_its_cpu():
            self._end(Outcome.TIME_LIMIT, f"{self._rules.cpu_seconds:g} s of CPU time")
        if self._time.seconds >= self._seconds:
            self._end(Outcome.TIME_LIMIT, f"no end within {self._seconds:g} s")
        self._allowance.require_patience(self._time)

    def _has_used_its_cpu(self) -> bool:
        return max(self._time.cpu, self._run.cpu_seconds() - self._cpu_before) >= self._rules.cpu_seconds

    def _select(self, writing: int | None, reading: list[int], seconds: float) -> None:
        with self._time:
            ready, _, _ = select.select(
                [*self._open_outputs, *reading],
                [writing] if writing is not None else [],
                [],
                max(0.0, seconds),
            )
        for descriptor in ready:
            if descriptor == self._run.replies:
                self._read_replies()
            elif descriptor in self._open_outputs:
                self._drain(descriptor)

    def _read_replies(self) -> None:
        data = os.read(self._run.replies, 1 << 16)
        self._reply_open = bool(data)
        try:
            self._replies.extend(self._frames.feed(data))
        except BadReply:
            self._end(Outcome.OUTPUT_LIMIT, "a reply over the size limit")
        if len(self._replies) > 1:
            self._end(Outcome.WRONG, "several replies to one call")

    def _drain(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._open_outputs.discard(descriptor)
            return
        self._output[descriptor] += data
        if sum(map(len, self._output.values())) > OUTPUT_KIB * 1024:
            self._end(Outcome.OUTPUT_LIMIT, f"more than {OUTPUT_KIB} KiB of output")

    def _write_some(self, left: memoryview) -> memoryview:
        try:
            left = left[os.write(self._stdin, left[: 1 << 16]) :] if left else left
        except BlockingIOError:
            return left
        except BrokenPipeError:
            left = left[:0]
        if not left:
            self._close_stdin()
        return left

    def _close_stdin(self) -> None:
        stream = self._run.process.stdin
        if stream is not None and not stream.closed:
            stream.close()

    def _ended_early(self) -> NoReturn:
        """Explain a process that ended or closed its side without the expected reply."""
        try:
            status = self._run.process.wait(timeout=_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        self._explain(status)

    def _explain(self, status: int | None) -> NoReturn:
        if self._run.memory_was_exceeded() or b"MemoryError" in self._output[self._stderr][-400:]:
            self._end(Outcome.MEMORY_LIMIT, f"more than {self._rules.memory_mib} MiB")
        if status == _SIGSYS_STATUS:
            self._end(Outcome.FORBIDDEN, "a system call that is not allowed")
        if self._has_used_its_cpu():
            self._end(Outcome.TIME_LIMIT, f"{self._rules.cpu_seconds:g} s of CPU time")
        self._end(Outcome.RUNTIME_ERROR, f"the program ended with status {status} before it replied")

    def _end(self, outcome: Outcome, reason: str) -> NoReturn:
        raise CandidateEnded(outcome, reason)


def _name(reply: dict[str, Any]) -> str:
    name = reply.get("raised")
    return ascii(name[:60]).strip("'") if isinstance(name, str) else "something"
