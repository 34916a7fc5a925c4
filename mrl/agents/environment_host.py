"""Host of one environment: `python -m mrl.agents.environment_host PARENT_PID`.

consumes      JSON frames on stdin, a pipe (host_messages.py): EnvironmentSpec and Deadlines, then calls
produces      JSON frames on the former stdout: {"ready"} or {"broken"}, then one reply per call
waits for     frames, replies and ends of episode processes, and their deadlines; all in one place
never does    call the environment itself: each episode is a forked process, so that none harms another

The environment's module is imported once, here; an episode costs a fork. A close is a call without a reply.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import sys
import time
from collections.abc import Callable
from typing import Any

from mrl.agents.answer import EnvironmentFault
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_messages import read_call, read_opening
from mrl.agents.environment_registry import find_environment
from mrl.agents.process_handle import EnvironmentProcess
from mrl.errors import ConfigError
from mrl.processes.channel import Outbox, read_some, take_over_stdio
from mrl.processes.framing import BadReply, FrameBuffer, OversizedReply, frame
from mrl.processes.lifeline import die_with_parent

_MAX_REQUEST_BYTES = 2**31
_TICK_SECONDS = 0.5
_LEAST_SECONDS = 0.02
_UNSENT_SECONDS = 0.002


class Host:
    """Host of all episode processes ("guests") of one environment."""

    def __init__(
        self,
        make: Callable[[], Any],
        deadlines: Deadlines,
        requests: int,
        replies: Outbox,
        buffer: FrameBuffer,
    ) -> None:
        """`make` makes an environment's object; `buffer` contains the requests so far."""
        self._make, self._deadlines = make, deadlines
        self._guests: dict[str, EnvironmentProcess] = {}
        self._lost: dict[str, str] = {}
        """How guests ended that had no call at that time, by key; their next call reports it."""
        self._requests, self._out, self._buffer = requests, replies, buffer
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._stops_at: float | None = None

    def serve(self) -> None:
        """Serve until the pool sends no more, and all guests are closed or late to close."""
        while self._stops_at is None or (self._guests and time.monotonic() < self._stops_at):
            for key, _ in self._selector.select(self._pause()):
                if key.data is None:
                    self._read_requests()
                elif self._is_here(key.data):
                    self._hear(key.data, key.fd)
            self._out.flush()
            self._expire(time.monotonic())
        for handle in list(self._guests.values()):
            self._end(handle)

    def _pause(self) -> float:
        channels: list[Outbox | EnvironmentProcess] = [self._out, *self._guests.values()]
        if any(channel.has_unsent for channel in channels):
            for channel in channels:
                channel.flush()
            return _UNSENT_SECONDS
        calls = [handle.call for handle in self._guests.values() if handle.call]
        due = min((call.since + call.limit for call in calls), default=float("inf")) - time.monotonic()
        return max(_LEAST_SECONDS, min(_TICK_SECONDS, due))

    def _read_requests(self) -> None:
        data = read_some(self._requests)
        if data is None:
            self._stop()
            return
        for message in self._buffer.feed(data):
            self.take(*read_call(message))

    def take(self, key: str, turn: int, operation: str, payload: bytes) -> None:
        """Pass a call to its guest; `open`, `run` and `describe` start one."""
        handle = self._guests.get(key)
        if handle is not None and (handle.call is not None or operation in ("open", "run")):
            self._end(handle)  # its caller is gone
            handle = None
        if operation in ("open", "run", "describe"):
            handle = self._begin(key)
        lost = self._lost.pop(key, "its process is gone")
        if handle is not None:
            handle.begin(operation, turn, payload)
        elif operation != "close":
            self._reply(key, turn, 0.0, {"fault": EnvironmentFault.EXITED.value, "reason": lost})

    def _begin(self, key: str) -> EnvironmentProcess:
        descriptors = [fd for fd in self._selector.get_map() if isinstance(fd, int)]
        ends = [handle.requests for handle in self._guests.values()]
        handle = EnvironmentProcess(
            key, self._make, self._deadlines, [*descriptors, *ends, self._out.descriptor]
        )
        self._guests[key] = handle
        for descriptor in (handle.replies, handle.errors):
            self._selector.register(descriptor, selectors.EVENT_READ, handle)
        return handle

    def _is_here(self, handle: EnvironmentProcess) -> bool:
        return self._guests.get(handle.key) is handle

    def _stop(self) -> None:
        """Let every guest close its environment: no more calls will come."""
        self._selector.unregister(self._requests)
        self._stops_at = time.monotonic() + 2 * self._deadlines.close_seconds
        for handle in list(self._guests.values()):
            if handle.call is None:
                handle.finish()
            elif handle.call.operation != "close":
                self._end(handle)

    def _hear(self, handle: EnvironmentProcess, descriptor: int) -> None:
        if descriptor == handle.errors:
            if not handle.read_errors():
                self._selector.unregister(descriptor)
            return
        try:
            for reply in handle.read_replies():
                self._answered(handle, reply)
                if not self._is_here(handle):
                    return  # its output after the last reply is not read
        except EOFError:
            self._lose(handle, EnvironmentFault.EXITED)
        except OversizedReply as error:
            self._lose(handle, EnvironmentFault.OVERSIZED, str(error))
        except BadReply as error:
            self._lose(handle, EnvironmentFault.CONTRACT, str(error))

    def _answered(self, handle: EnvironmentProcess, reply: dict[str, Any]) -> None:
        call, handle.call = handle.call, None
        if call is None:
            self._lose(handle, EnvironmentFault.CONTRACT, "an answer without a call")
            return
        if call.operation in ("close", "describe") or "fault" in reply:
            self._end(handle)
        if call.operation != "close":
            self._reply(handle.key, call.turn, time.monotonic() - call.since, reply)

    def _reply(self, key: str, turn: int, seconds: float, reply: dict[str, Any]) -> None:
        _say(self._out, reply | {"key": key, "turn": turn, "seconds": seconds})

    def _expire(self, now: float) -> None:
        for handle in list(self._guests.values()):
            if handle.call is not None and handle.call.is_overdue(now):
                reason = (
                    f"{handle.call.operation}: no answer within {handle.call.limit:g} s "
                    f"(agent.{handle.call.operation}_seconds)"
                )
                self._lose(handle, EnvironmentFault.DEADLINE, reason)

    def _lose(self, handle: EnvironmentProcess, fault: EnvironmentFault, reason: str = "") -> None:
        """End a guest that has ended already, or must end because of the fault."""
        end = self._end(handle)
        call = handle.call
        if call is None:
            self._lost[handle.key] = reason or end
        elif call.operation != "close":
            reply = {"fault": fault.value, "reason": reason or end}
            self._reply(handle.key, call.turn, time.monotonic() - call.since, reply)

    def _end(self, handle: EnvironmentProcess) -> str:
        del self._guests[handle.key]
        for descriptor in (handle.replies, handle.errors):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        return handle.end()


def _say(channel: Outbox, message: dict[str, Any]) -> None:
    channel.send(frame(json.dumps(message).encode()))


def _nothing(**options: Any) -> None:
    """Stand in for the `prepare` of an environment that has none."""


def main() -> None:
    """Run the host of the environment that the first frame names."""
    die_with_parent(int(sys.argv[1]))
    requests, descriptor = take_over_stdio()
    os.set_blocking(requests, False)
    buffer, channel = FrameBuffer(_MAX_REQUEST_BYTES), Outbox(descriptor)
    received: list[bytes] = []
    while not received:
        select.select([requests], [], [])
        if (data := read_some(requests)) is None:
            return
        received += buffer.feed(data)
    spec, deadlines = read_opening(received[0])
    try:
        environment = find_environment(spec.name)
        getattr(environment, "prepare", _nothing)(**spec.options)
    except Exception as error:
        _say(channel, {"broken": str(error) if isinstance(error, ConfigError) else repr(error)})
        return
    gc.collect()
    gc.freeze()  # so that all guests share one copy of what exists now
    _say(channel, {"ready": True})
    host = Host(lambda: environment(**spec.options), deadlines, requests, channel, buffer)
    for message in received[1:]:
        host.take(*read_call(message))
    host.serve()


if __name__ == "__main__":
    main()
