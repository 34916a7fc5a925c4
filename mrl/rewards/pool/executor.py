"""Executor of work in a forked child, which can be killed at any time without losing the parent's imports.

The parent (a reward worker) never reads a response itself. A child that exceeds its deadline or memory is
killed by pid; the next request gets a new one, which costs a fork and no import.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Callable
from typing import Any

from mrl.processes.forked_child import ForkedChild
from mrl.processes.framing import BadReply, frame, read_frame
from mrl.processes.own_time import Allowance, OwnTimeClock, Starved


class ForkedExecutor:
    """Executor of `work(request) -> bytes` (a JSON reply) in a child, one request at a time."""

    def __init__(self, work: Callable[[Any], bytes], *, memory_bytes: int) -> None:
        self._work = work
        self._memory_bytes = memory_bytes
        self._child: ForkedChild | None = None

    def run(self, request: Any, *, deadline_seconds: float) -> dict[str, Any]:
        """Return the child's reply; {"limit": ...} if the sample exceeded its time, memory or reply size; or
        {"failed": ...}, with {"starved": True} if the machine gave the child no CPU.

        The deadline is the child's own time (without waits for a CPU) from the start of this request.
        """
        child = self._child = self._child or ForkedChild(self._serve)
        own_time = OwnTimeClock(child.pid, limit=deadline_seconds)
        child.send(request)
        try:
            return child.next_reply(own_time, Allowance.of(deadline_seconds), deadline_seconds)
        except EOFError:
            return {"failed": f"the reward worker died with status {self._end(child)}"}
        except TimeoutError:
            self._end(child)
            return {"limit": f"time limit of {deadline_seconds:g} s"}
        except Starved as starved:
            self._end(child)
            return {"failed": str(starved), "starved": True}
        except BadReply as error:  # a reply over the limit, or unreadable
            self._end(child)
            return {"limit": str(error)}

    def close(self) -> None:
        if self._child is not None:
            self._end(self._child)

    def _end(self, child: ForkedChild) -> int:
        self._child = None
        return child.reap()

    def _serve(self, requests: int, replies: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self._memory_bytes, self._memory_bytes))
        with os.fdopen(requests, "rb") as stream, os.fdopen(replies, "wb") as channel:
            while (payload := read_frame(stream)) is not None:
                try:
                    reply = self._work(pickle.loads(payload))
                except MemoryError:
                    limit = f"memory limit of {self._memory_bytes >> 20} MiB (reward.memory_mib)"
                    reply = json.dumps({"limit": limit}).encode()
                channel.write(frame(reply))
                channel.flush()
