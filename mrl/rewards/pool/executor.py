"""Work in a forked child that can be killed at any moment without losing the parent's imports.

The parent (a reward worker) stays clean: it never reads a response itself. A child that exceeds its deadline
or memory is killed by pid and the next request gets a new one, which costs a fork and no import.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from mrl.rewards.frames import FrameBuffer, frame, parse_reply, read_frame
from mrl.rewards.pool.lifeline import die_with_parent

STARVED_SHARE = 0.05
"""A child that got less than this share of its deadline as processor time was starved: the machine's fault,
not the sample's."""


class ForkedExecutor:
    """Runs `work(request) -> bytes` (a JSON reply) in a child, one request at a time."""

    def __init__(self, work: Callable[[Any], bytes], *, memory_bytes: int) -> None:
        self._work = work
        self._memory_bytes = memory_bytes
        self._pid = 0
        self._to_child = self._from_child = -1
        self._cpu_before = 0.0
        self._ended_by_itself = False

    def run(self, request: Any, *, deadline_seconds: float) -> dict[str, Any]:
        """The child's reply, or {"limit": ...} where the sample used up its time or memory, or {"failed":
        ...}.

        The deadline counts by the clock from the start of this work, so that what waits behind it is delayed
        by no more.
        """
        last = time.monotonic() + deadline_seconds
        if not self._pid:
            self._fork()
        self._cpu_before = _cpu_seconds(self._pid)
        payload = pickle.dumps(request)
        try:
            _write_all(self._to_child, frame(payload))
            reply = self._wait(last)
        except BrokenPipeError:
            self._ended_by_itself = True
            reply = None
        if reply is not None:
            return reply
        return self._end(deadline_seconds)

    def close(self) -> None:
        if self._pid:
            self._end(0.0)

    def _wait(self, last: float) -> dict[str, Any] | None:
        buffer = FrameBuffer()
        while (left := last - time.monotonic()) > 0:
            ready, _, _ = select.select([self._from_child], [], [], left)
            if not ready:
                return None
            data = os.read(self._from_child, 1 << 16)
            if not data:
                self._ended_by_itself = True
                return None
            for payload in buffer.feed(data):
                return parse_reply(payload)
        return None

    def _cpu_used(self) -> float:
        return _cpu_seconds(self._pid) - self._cpu_before

    def _end(self, deadline_seconds: float) -> dict[str, Any]:
        """Kill and reap the child; say why it had to go."""
        used = self._cpu_used()
        died, self._ended_by_itself = self._ended_by_itself, False
        if not died:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._to_child)
        os.close(self._from_child)
        self._pid = 0
        if died:
            return {"failed": f"the reward worker died with status {os.waitstatus_to_exitcode(status)}"}
        if used < STARVED_SHARE * deadline_seconds:
            return {
                "failed": f"the reward worker got {used:.2f} s of processor time in {deadline_seconds:g} s"
            }
        return {"limit": f"time limit of {deadline_seconds:g} s"}

    def _fork(self) -> None:
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(requests_in)
                os.close(replies_out)
                self._serve(parent, requests_out, replies_in)
            finally:
                os._exit(1)
        os.close(requests_out)
        os.close(replies_in)
        self._pid, self._to_child, self._from_child = pid, requests_in, replies_out

    def _serve(self, parent: int, requests: int, replies: int) -> None:
        die_with_parent(parent)
        resource.setrlimit(resource.RLIMIT_AS, (self._memory_bytes, self._memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(requests, "rb") as stream:
            while (payload := read_frame(stream)) is not None:
                try:
                    reply = self._work(pickle.loads(payload))
                except MemoryError:
                    limit = f"memory limit of {self._memory_bytes >> 20} MiB (reward.memory_mib)"
                    reply = json.dumps({"limit": limit}).encode()
                _write_all(replies, frame(reply))
        os._exit(0)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cpu_seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
