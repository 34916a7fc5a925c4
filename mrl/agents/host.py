"""The host of one environment: `python -m mrl.agents.host PARENT_PID`.

consumes      frames of JSON on standard input, a pipe or a socket (host_messages.py): first EnvironmentSpec and Deadlines, then calls
produces      JSON frames where standard output was: {"ready"} or {"broken"}, then one reply for each call
waits for     frames, its guests' replies and ends, and their deadlines; all in one place
never does    call the environment itself: each episode is a forked guest, so that what one does harms no other

The environment's module is read once, here; a guest costs a fork. A close is a call without a reply.
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
from mrl.agents.environment_registry import find_environment
from mrl.agents.handle import GuestHandle
from mrl.agents.host_messages import read_call, read_opening
from mrl.errors import ConfigError
from mrl.processes.channel import Outbox, read_some, take_over
from mrl.processes.framing import BadReply, FrameBuffer, OversizedReply, frame
from mrl.processes.lifeline import die_with_parent

_MAX_REQUEST_BYTES = 2**31
_TICK_SECONDS = 0.5
_LEAST_SECONDS = 0.02
_UNSENT_SECONDS = 0.002


class Host:
    """All guests of one environment."""

    def __init__(
        self,
        make: Callable[[], Any],
        deadlines: Deadlines,
        requests: int,
        replies: Outbox,
        buffer: FrameBuffer,
    ) -> None:
        """`make` gives an environment's object; `buffer` is that of the requests so far."""
        self._make, self._deadlines = make, deadlines
        self._guests: dict[str, GuestHandle] = {}
        self._lost: dict[str, str] = {}
        """How guests ended that nothing was asked of at that time; their next call says so."""
        self._requests, self._out, self._buffer = requests, replies, buffer
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._stops_at: float | None = None

    def serve(self) -> None:
        """Until the pool has no more to ask, and all guests have been closed or are late with it."""
        while self._stops_at is None or (self._guests and time.monotonic() < self._stops_at):
            for key, _ in self._selector.select(self._pause()):
                if key.data is None:
                    self._read_requests()
                elif self._is_here(key.data):
                    self._hear(key.data, key.fd)
            self._out.flush()
            self._expire(time.monotonic())
        for one in list(self._guests.values()):
            self._end(one)

    def _pause(self) -> float:
        boxes: list[Outbox | GuestHandle] = [self._out, *self._guests.values()]
        if any(box.has_unsent for box in boxes):
            for box in boxes:
                box.flush()
            return _UNSENT_SECONDS
        calls = [one.call for one in self._guests.values() if one.call]
        due = min((call.since + call.limit for call in calls), default=float("inf")) - time.monotonic()
        return max(_LEAST_SECONDS, min(_TICK_SECONDS, due))

    # -- what is asked -------------------------------------------------------------------------------------------

    def _read_requests(self) -> None:
        data = read_some(self._requests)
        if data is None:
            self._stop()
            return
        for message in self._buffer.feed(data):
            self.take(*read_call(message))

    def take(self, key: str, turn: int, operation: str, payload: bytes) -> None:
        """A call for a guest."""
        one = self._guests.get(key)
        if one is not None and (one.call is not None or operation == "open"):
            self._end(one)  # whoever asked is gone
            one = None
        if operation in ("open", "describe"):
            one = self._begin(key)
        lost = self._lost.pop(key, "its process is gone")
        if one is not None:
            one.begin(operation, turn, payload)
        elif operation != "close":
            self._reply(key, turn, 0.0, {"fault": EnvironmentFault.EXITED.value, "reason": lost})

    def _begin(self, key: str) -> GuestHandle:
        descriptors = [fd for fd in self._selector.get_map() if isinstance(fd, int)]
        ends = [one.requests for one in self._guests.values()]
        one = GuestHandle(key, self._make, self._deadlines, [*descriptors, *ends, self._out.descriptor])
        self._guests[key] = one
        for descriptor in (one.replies, one.errors):
            self._selector.register(descriptor, selectors.EVENT_READ, one)
        return one

    def _is_here(self, one: GuestHandle) -> bool:
        return self._guests.get(one.key) is one

    def _stop(self) -> None:
        """Nobody asks any more: every guest closes its environment."""
        self._selector.unregister(self._requests)
        self._stops_at = time.monotonic() + 2 * self._deadlines.close_seconds
        for one in list(self._guests.values()):
            if one.call is None:
                one.finish()
            elif one.call.operation != "close":
                self._end(one)

    # -- what is answered ----------------------------------------------------------------------------------------

    def _hear(self, one: GuestHandle, descriptor: int) -> None:
        if descriptor == one.errors:
            if not one.read_errors():
                self._selector.unregister(descriptor)
            return
        try:
            for reply in one.read_replies():
                self._answered(one, reply)
                if not self._is_here(one):
                    return  # what it said after its last reply is not read
        except EOFError:
            self._lose(one, EnvironmentFault.EXITED)
        except OversizedReply as error:
            self._lose(one, EnvironmentFault.OVERSIZED, str(error))
        except BadReply as error:
            self._lose(one, EnvironmentFault.CONTRACT, str(error))

    def _answered(self, one: GuestHandle, reply: dict[str, Any]) -> None:
        call, one.call = one.call, None
        if call is None:
            self._lose(one, EnvironmentFault.CONTRACT, "an answer that nobody asked for")
            return
        if call.operation in ("close", "describe") or "fault" in reply:
            self._end(one)
        if call.operation != "close":
            self._reply(one.key, call.turn, time.monotonic() - call.since, reply)

    def _reply(self, key: str, turn: int, seconds: float, reply: dict[str, Any]) -> None:
        _say(self._out, reply | {"key": key, "turn": turn, "seconds": seconds})

    def _expire(self, now: float) -> None:
        for one in list(self._guests.values()):
            if one.call is not None and one.call.is_overdue(now):
                reason = f"{one.call.operation}: no answer within {one.call.limit:g} s (agent.{one.call.operation}_seconds)"
                self._lose(one, EnvironmentFault.DEADLINE, reason)

    def _lose(self, one: GuestHandle, fault: EnvironmentFault, reason: str = "") -> None:
        """Ends a guest that has ended already, or has to for the fault."""
        end = self._end(one)
        call = one.call
        if call is None:
            self._lost[one.key] = reason or end
        elif call.operation != "close":
            told = {"fault": fault.value, "reason": reason or end}
            self._reply(one.key, call.turn, time.monotonic() - call.since, told)

    def _end(self, one: GuestHandle) -> str:
        del self._guests[one.key]
        for descriptor in (one.replies, one.errors):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        return one.end()


def _say(channel: Outbox, message: dict[str, Any]) -> None:
    channel.send(frame(json.dumps(message).encode()))


def _nothing(**options: Any) -> None:
    """What an environment without it prepares."""


def main() -> None:
    """The host of the environment that the first frame names."""
    die_with_parent(int(sys.argv[1]))
    requests, descriptor = take_over()
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
    gc.freeze()  # what is here already stays one copy in all guests
    _say(channel, {"ready": True})
    host = Host(lambda: environment(**spec.options), deadlines, requests, channel, buffer)
    for message in received[1:]:
        host.take(*read_call(message))
    host.serve()


if __name__ == "__main__":
    main()
