"""A receiver's conversation with the one sender of a session: who may speak, and how long anything is waited
for.

Any other sender is refused and does no harm. Owns neither what is said (`wire/messages`) nor how it travels
(`wire/channel`).
"""

from __future__ import annotations

import time

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Listener, Lost
from mrl.resharding.wire.processes import ProcessId


class SessionConversation:
    """Begins with `accept`; everything after is with the sender that was accepted."""

    def __init__(self, listener: Listener, session: Session, deadline_seconds: float) -> None:
        self.session = session
        self.wait_seconds = 0.0
        """Spent waiting for the sender, since it was accepted."""
        self._listener, self._seconds = listener, deadline_seconds
        self._sender: tuple[bytes, ProcessId] | None = None
        self._lost: Lost = lambda: None

    @property
    def begun(self) -> bool:
        """A sender was accepted."""
        return self._sender is not None

    def accept(self) -> m.Open:
        """Waits for this session's sender. WeightSyncError when it is not there in time or opens something
        else."""
        session, deadline = self.session, time.monotonic() + self._seconds
        while True:
            sender, message = self._listener.receive(deadline, f"the sender of {session} to open it")
            if isinstance(message, m.Open) and message.session_id == session.session_id:
                break
            self._refuse(sender, message, f"this receiver waits for {session}")
        theirs = Session(
            message.session_id, message.from_version, message.to_version, message.digest, message.full
        )
        if theirs != session:
            reason = f"the sender opened {theirs} with digest {theirs.digest[:12]}, expected {session} with {session.digest[:12]}"
            self._listener.send(sender, m.Failed(session_id=message.session_id, error=reason))
            raise WeightSyncError(reason)
        self._sender = (sender, ProcessId(message.pid, message.start_ticks))
        self._lost = self._listener.watch(*self._sender)
        return message

    def send(self, message: m.Message) -> None:
        assert self._sender is not None
        self._listener.send(self._sender[0], message)

    def next(self, waiting_for: str, *, seconds: float | None = None) -> m.AnyMessage:
        """The sender's next message; others are refused meanwhile. An Abort is raised."""
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
                raise WeightSyncError(f"the sender gave {session} up:\n{message.error}")
            return message

    def given_up(self) -> str | None:
        """Why the sender will not come to meet, or None."""
        assert self._sender is not None
        waiting = self._listener.glance()
        if waiting is not None and waiting[0] == self._sender[0] and isinstance(waiting[1], m.Abort):
            return f"the sender gave {self.session} up:\n{waiting[1].error}\nand this"
        return self._lost()

    def _refuse(self, sender: bytes, message: m.AnyMessage | WeightSyncError, why: str) -> None:
        """Answers an Open or a malformed message; the rest of a refused or dead session is dropped."""
        if isinstance(message, WeightSyncError):
            self._listener.send(sender, m.Failed(session_id="", error=str(message)))
        elif isinstance(message, m.Open):
            reason = f"session {message.session_id[:8]} (version {message.from_version} -> {message.to_version}) refused: {why}"
            self._listener.send(sender, m.Failed(session_id=message.session_id, error=reason))
