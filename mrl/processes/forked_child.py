"""A forked child with a pipe each way: it costs a fork and no import, and is killed by pid at any moment."""

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

from mrl.processes.channel import Line
from mrl.processes.framing import MAX_REPLY_BYTES
from mrl.processes.lifeline import die_with_parent
from mrl.processes.own_time import Allowance, OwnTime, wait_within

_FORKING = threading.Lock()
"""One thread forks at a time: filelock refuses a fork while another thread is in one."""


class ForkedChild(Line):
    """A running `serve(requests, replies)`, which is given its ends of the pipes and ends with the process that made it."""

    def __init__(self, serve: Callable[[int, int], None], *, limit: int = MAX_REPLY_BYTES) -> None:
        """`limit`: bytes of a reply. OSError where the machine gives no process."""
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

    def next_reply(self, own: OwnTime, allowance: Allowance, seconds: float) -> dict[str, Any]:
        """Wait for the next reply.

        Raises:
            TimeoutError: it used up so many seconds of its own time before.
            Starved: the machine gave it too little processor time.
            EOFError: it has ended.
            BadReply: the reply cannot be read.
        """
        while not self._arrived:
            if not wait_within(own, allowance, self._has_data, seconds=seconds):
                raise TimeoutError
            self._arrived.extend(self.read_replies())
        return self._arrived.popleft()

    def _has_data(self, seconds: float) -> bool:
        self.flush()
        writing = [self.requests] if self.has_unsent else []
        return bool(select.select([self.replies], writing, [], seconds)[0])

    def finish(self) -> None:
        """Close its requests."""
        os.close(self.requests)
        self.requests = -1

    def end(self) -> object:
        """Kill and reap it; return how it ended."""
        return self.reap()

    def reap(self) -> int:
        """Kill and reap it, and close the pipes; return its exit status, negative for a signal's number."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        for descriptor in (self.requests, self.replies):
            if descriptor >= 0:
                os.close(descriptor)
        return os.waitstatus_to_exitcode(status)
