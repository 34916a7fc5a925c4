"""Wait for a command of a sandbox, with its door, its output and its deadline in one place.

| waits for | unblocked by |
|---|---|
| the command's end | the command, or its deadline |
| connections of the door | programs in the sandbox, the model's server |
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable

from mrl.agents.sandboxes.door import Door
from mrl.processes.channel import read_some

_LOOK_SECONDS = 0.25
_DRAIN_SECONDS = 5.0
"""Time to read the end of the output, after the end of all that could write it."""


class CommandOutput:
    """Last bytes of a command's output, and its first ones."""

    def __init__(self, descriptor: int, kept_bytes: int, *, head_bytes: int = 0) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._kept, self._data = descriptor, kept_bytes, b""
        self._head_bytes, self.head = head_bytes, b""

    def read(self) -> bool:
        """Read what is there; return False at its end."""
        data = read_some(self.descriptor)
        self.head += (data or b"")[: self._head_bytes - len(self.head)]
        self._data = (self._data + (data or b""))[-self._kept :]
        return data is not None

    def drain(self) -> None:
        """Read to the end."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self.read() and time.monotonic() < deadline:
            select.select([self.descriptor], [], [], 0.1)

    def text(self) -> str:
        return self._data.decode("utf-8", "replace")


def wait_for_command(
    process: subprocess.Popen[bytes],
    output: CommandOutput,
    *,
    seconds: float,
    door: Door | None,
    kill: Callable[[], None],
    exceeds: Callable[[], bool] | None = None,
) -> bool:
    """Wait until a process ends; return True if it was killed after `seconds`.

    Args:
        door: Forwards meanwhile.
        kill: Ends the process, whatever it does.
        exceeds: Called every quarter of a second; the process is killed once it returns True.
    """
    deadline = time.monotonic() + seconds
    end = os.pidfd_open(process.pid)
    timed_out = False
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ, lambda: None)
        selector.register(
            output.descriptor,
            selectors.EVENT_READ,
            lambda: None if output.read() else selector.unregister(output.descriptor),
        )
        if door is not None:
            door.register(selector)
        try:
            next_look = 0.0
            while process.poll() is None and not timed_out:
                now = time.monotonic()
                if exceeds is not None and now >= next_look:
                    if exceeds():
                        break
                    next_look = now + _LOOK_SECONDS
                until = deadline if exceeds is None else min(deadline, next_look)
                for key, _ in selector.select(max(0.0, until - now)):
                    key.data()
                timed_out = time.monotonic() >= deadline
        finally:
            if process.poll() is None:
                kill()
            if door is not None:
                door.unregister(selector)
            os.close(end)
    output.drain()
    return timed_out
