"""A forked child with a pipe each way: it costs a fork and no import, and is killed by pid at any moment."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

from mrl.processes.lifeline import die_with_parent


class ForkedChild:
    """A running `serve(requests, replies)`, which is given its ends of the pipes and ends with the process that made it."""

    def __init__(self, serve: Callable[[int, int], None]) -> None:
        requests_out, self.requests = os.pipe()
        self.replies, replies_in = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.requests)
                os.close(self.replies)
                die_with_parent(parent)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                serve(requests_out, replies_in)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(requests_out)
        os.close(replies_in)

    def end(self) -> int:
        """Kills and reaps it, and closes the pipes; its exit status, negative for a signal's number."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.requests)
        os.close(self.replies)
        return os.waitstatus_to_exitcode(status)
