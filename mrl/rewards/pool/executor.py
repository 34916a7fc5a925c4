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
from collections.abc import Callable
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.frames import FrameBuffer, frame, parse_reply, read_frame
from mrl.rewards.own_time import Allowance, OwnTime, Starved
from mrl.rewards.pool.lifeline import die_with_parent


class ForkedExecutor:
    """Runs `work(request) -> bytes` (a JSON reply) in a child, one request at a time."""

    def __init__(self, work: Callable[[Any], bytes], *, memory_bytes: int) -> None:
        self._work = work
        self._memory_bytes = memory_bytes
        self._pid = 0
        self._to_child = self._from_child = -1

    def run(self, request: Any, *, deadline_seconds: float) -> dict[str, Any]:
        """The child's reply, or {"limit": ...} where the sample used up its time or memory or answered too
        much, or {"failed": ...}, with {"starved": True} where the machine gave the child no processor.

        The deadline is own time from the start of this work: what waits behind it is delayed by no more.
        """
        if not self._pid:
            self._fork()
        try:
            _write_all(self._to_child, frame(pickle.dumps(request)))
            return self._answer(Allowance.of(deadline_seconds))
        except (BrokenPipeError, EOFError):
            return {"failed": f"the reward worker died with status {self._end()}"}
        except TimeoutError:
            self._end()
            return {"limit": f"time limit of {deadline_seconds:g} s"}
        except Starved as starved:
            self._end()
            return {"failed": str(starved), "starved": True}
        except RewardError as error:  # a reply over the limit, or none that can be read
            self._end()
            return {"limit": str(error)}

    def close(self) -> None:
        if self._pid:
            self._end()

    def _answer(self, allowance: Allowance) -> dict[str, Any]:
        buffer, own = FrameBuffer(), OwnTime(self._pid, limit=allowance.left)
        while True:
            with own:
                ready, _, _ = select.select([self._from_child], [], [], own.pause)
            if ready:
                data = os.read(self._from_child, 1 << 16)
                if not data:
                    raise EOFError
                for payload in buffer.feed(data):
                    return parse_reply(payload)
            if not own.pause:
                own.look()
            if own.seconds >= allowance.left:
                raise TimeoutError
            allowance.require_patience(own)

    def _end(self) -> int:
        """Kill and reap the child; its exit status."""
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._to_child)
        os.close(self._from_child)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

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
