"""A session's bytes that a thread takes while the engine serves: they enter the weights later, all at once.

Waits for the sender in each step of the session, with the receiver's deadline; a session that is given up
ends the waits at once.
"""

from __future__ import annotations

import dataclasses
import threading
import traceback
from collections.abc import Callable

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.conversation import SessionConversation
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Listener

_PATIENCE_SECONDS = 1.0
"""How long a given-up thread may take to notice, before its messages are dropped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """How a session was opened whose windows have all been taken."""

    opening: m.Open
    tables: Tables


class Staging(threading.Thread):
    """The thread of one session. Until it has ended, the receiver's socket and inbox belong to it."""

    def __init__(
        self,
        listener: Listener,
        session: Session,
        deadline_seconds: float,
        device: torch.device,
        take: Callable[[SessionConversation], Taken],
    ) -> None:
        """Start it. `take`: takes all windows, or informs the sender and raises."""
        super().__init__(name="weight sync", daemon=True)
        self.session, self._device, self._take, self._seconds = session, device, take, deadline_seconds
        self._is_given_up = threading.Event()
        self.conversation = SessionConversation(listener, session, deadline_seconds, self._given_up)
        self._result: Taken | str = ""
        """What was taken, or the traceback of the error."""
        self.start()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._result = self._take(self.conversation)
        except BaseException as error:
            self._result = "".join(traceback.format_exception(error))

    def taken(self) -> Taken:
        """Return what was taken, once the thread has ended; raise WeightSyncError if it failed."""
        self.join()  # each of its waits has a deadline
        if isinstance(self._result, str):
            raise WeightSyncError(f"{self.session} could not be received:\n{self._result}")
        return self._result

    def give_up(self, drop_messages: Callable[[], None]) -> None:
        """End the thread. `drop_messages`: ends a wait for bytes of a sender that is silent."""
        self._is_given_up.set()
        self.join(_PATIENCE_SECONDS)
        if self.is_alive():
            drop_messages()
            self.join()

    def _given_up(self) -> str | None:
        return "this receiver gave up the session" if self._is_given_up.is_set() else None
