"""A forked child with one pipe per direction: starts without imports and can be killed by pid at any time."""

from __future__ import annotations

import collections
import itertools
import os
import resource
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

from mrl.processes.channel import WorkerPipes
from mrl.processes.framing import MAX_REPLY_BYTES
from mrl.processes.lifeline import die_with_parent
from mrl.processes.own_time import Allowance, OwnTimeClock, wait_within

_FORKING = threading.Lock()
"""One thread forks at a time: filelock raises if two threads fork at once."""


class ForkedChild(WorkerPipes):
    """A child that runs `serve(requests, replies)` on its ends of the pipes and dies with its parent."""

    def __init__(self, serve: Callable[[int, int], None], *, limit: int = MAX_REPLY_BYTES) -> None:
        """Fork; `limit`: maximum bytes of a reply. Raises OSError if the fork fails."""
        parent = os.getpid()
        (requests_out, requests), (replies, replies_in) = pipes = os.pipe(), os.pipe()
        try:
            with _FORKING:
                self.pid = os.fork()
        except BaseException:
            for end in itertools.chain(*pipes):
                os.close(end)
            raise
        if self.pid == 0:
            try:
                os.close(requests)
                os.close(replies)
                die_with_parent(parent)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                serve(requests_out, replies_in)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(requests_out)
        os.close(replies_in)
        super().__init__(requests, replies, limit=limit)
        self._arrived: collections.deque[dict[str, Any]] = collections.deque()

    def next_reply(self, clock: OwnTimeClock, allowance: Allowance, seconds: float) -> dict[str, Any]:
        """Wait for the next reply.

        Raises:
            TimeoutError: The child used `seconds` of its own time without a reply.
            Starved: The machine gave it too little CPU time.
            EOFError: The child has ended.
            BadReply: The reply cannot be parsed.
        """
        while not self._arrived:
            if not wait_within(clock, allowance, self._has_data, seconds=seconds):
                raise TimeoutError
            self._arrived.extend(self.read_replies())
        return self._arrived.popleft()

    def _has_data(self, seconds: float) -> bool:
        self.flush()
        writers = [self.requests] if self.has_unsent else []
        return bool(select.select([self.replies], writers, [], seconds)[0])

    def finish(self) -> None:
        """Close the request pipe."""
        os.close(self.requests)
        self.requests = -1

    def end(self) -> object:
        """Kill and reap the child; return its exit status."""
        return self.reap()

    def reap(self) -> int:
        """Kill and reap the child, close the pipes; return its exit status, -N for signal N."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        for descriptor in (self.requests, self.replies):
            if descriptor >= 0:
                os.close(descriptor)
        return os.waitstatus_to_exitcode(status)
