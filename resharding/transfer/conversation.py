"""A receiver's conversation with the one sender of a session: refuses other senders and limits every wait.

The messages are in `wire/messages`, their transport in `wire/channel`.
"""

from __future__ import annotations

import time

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Listener, Lost
from mrl.resharding.wire.processes import ProcessId


class SessionConversation:
    """Conversation that begins with `accept`; everything after is with the accepted sender."""

    def __init__(
        self, listener: Listener, session: Session, deadline_seconds: float, given_up: Lost = lambda: None
    ) -> None:
        """`given_up`: returns why this receiver itself gave up the session, or None."""
        self.session = session
        self.wait_seconds = 0.0
        """Seconds spent waiting for the sender since it was accepted."""
        self._listener, self._seconds = listener, deadline_seconds
        self._sender: tuple[bytes, ProcessId] | None = None
        self._given_up, self._gone = given_up, given_up

    @property
    def accepted(self) -> bool:
        """True once a sender was accepted."""
        return self._sender is not None

    def accept(self) -> m.Open:
        """Wait for this session's sender; raise WeightSyncError if it is late or opens another session."""
        session, deadline = self.session, time.monotonic() + self._seconds
        while True:
            sender, message = self._listener.receive(
                deadline, f"the sender of {session} to open it", self._given_up
            )
            if isinstance(message, m.Open) and message.session_id == session.session_id:
                break
            self._refuse(sender, message, f"this receiver waits for {session}")
        opened = Session(
            message.session_id, message.from_version, message.to_version, message.digest, message.full
        )
        if opened != session:
            reason = (
                f"the sender opened {opened} with digest {opened.digest[:12]}, expected {session} with "
                f"digest {session.digest[:12]}"
            )
            self._listener.send(sender, m.Failed(session_id=message.session_id, error=reason))
            raise WeightSyncError(reason)
        self._sender = (sender, ProcessId(message.pid, message.start_ticks))
        self._gone = self._listener.watch(*self._sender)
        return message

    def send(self, message: m.Message) -> None:
        assert self._sender is not None
        self._listener.send(self._sender[0], message)

    def next(self, waiting_for: str, *, seconds: float | None = None) -> m.AnyMessage:
        """Return the sender's next message and refuse other senders meanwhile; raise an Abort."""
        assert self._sender is not None
        session, mark = self.session, time.monotonic()
        while True:
            sender, message = self._listener.receive(
                mark + (seconds or self._seconds), f"{waiting_for} of {session}", self._lost
            )
            if sender != self._sender[0]:
                self._refuse(sender, message, f"{session} is in progress with process {self._sender[1].pid}")
                continue
            self.wait_seconds += time.monotonic() - mark
            if isinstance(message, WeightSyncError):
                raise message
            if message.session_id != session.session_id:
                raise WeightSyncError(f"a message of session {message.session_id[:8]} inside {session}")
            if isinstance(message, m.Abort):
                raise WeightSyncError(f"the sender gave up {session}:\n{message.error}")
            return message

    def peer_failure(self) -> str | None:
        """Return why the sender will not join, or None."""
        assert self._sender is not None
        pending = self._listener.peek()
        if pending is not None and pending[0] == self._sender[0] and isinstance(pending[1], m.Abort):
            return f"the sender gave up {self.session}:\n{pending[1].error}\nand this"
        return self._lost()

    def _lost(self) -> str | None:
        return self._given_up() or self._gone()

    def _refuse(self, sender: bytes, message: m.AnyMessage | WeightSyncError, why: str) -> None:
        """Answer an Open or a malformed message; ignore other messages of a refused or dead session."""
        if isinstance(message, WeightSyncError):
            self._listener.send(sender, m.Failed(session_id="", error=str(message)))
        elif isinstance(message, m.Open):
            reason = (
                f"session {message.session_id[:8]} (version {message.from_version} -> {message.to_version}) "
                f"refused: {why}"
            )
            self._listener.send(sender, m.Failed(session_id=message.session_id, error=reason))
