"""The sending end: two buffers, one filled while the other is sent or unpacked.

Owns the protocol. Its link (`wire`) moves the bytes, its caller (`SentSession`) fills the buffers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.wire import memory
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Dialer
from mrl.resharding.wire.mesh import MessageLost
from mrl.resharding.wire.mesh_link import MeshLink
from mrl.resharding.wire.processes import ProcessId
from mrl.resharding.wire.slot_link import SlotLink

_LAST_WORDS_SECONDS = 2.0
"""How long a sender that lost a message waits for the receiver's own error."""

_Answer = TypeVar("_Answer", bound=m.Message)


class WeightSender:
    """Feeds one engine rank, one session at a time: announce, accepted, then next_buffer and send_window in
    turn, then finish, and commit or abort."""

    def __init__(self, address: str, sync: SyncSection, link: SlotLink | MeshLink | None = None) -> None:
        """`address`: from the engine's `prepare_sync`. `link`: default is the shared memory of a CPU slot."""
        self._sync = sync
        self._dialer = Dialer(address)
        self._link = link or SlotLink(sync.bucket_bytes, torch.device("cpu"))
        self._session: Session | None = None
        self._sent = 0
        self._done = 0
        self.wait_seconds = 0.0

    def redial(self, address: str) -> None:
        """Feed a new process in the receiver's place; its first session opens the link's memory anew."""
        self.abort("its receiver was replaced")
        self._dialer.close()
        self._dialer = Dialer(address)

    def announce(
        self, session: Session, tables: Tables, *, lease: Sequence[dict[str, Any]] = (), at_once: bool = False
    ) -> None:
        """Announce the session to the receiver; call `accepted` next.

        Args:
            lease: descriptions of the trainer's memory (`lease.describe_*`).
            at_once: the leased memory contains all windows, and none is sent.
        """
        if self._session is not None:
            raise WeightSyncError(f"{session} refused: this sender has {self._session} open")
        process = ProcessId.own()
        self._sent = len(tables.windows) if at_once else 0
        self._done, self.wait_seconds = 0, 0.0
        self._session = session
        self._post(
            m.Open(
                session_id=session.session_id,
                from_version=session.from_version,
                to_version=session.to_version,
                digest=session.digest,
                pid=process.pid,
                start_ticks=process.start_ticks,
                buffers=self._link.describe(session.session_id),
                lease=list(lease),
                tables_digest=tables.digest,
                at_once=at_once,
                full=session.full,
            )
        )

    def accepted(self, tables: Tables) -> m.Opened:
        """Wait until the receiver accepts the session; send it the tables if it lacks them."""
        opened = self._next(m.Opened, "the receiver to accept")
        if opened.wants_tables:
            self._post(m.PlanTables(session_id=self._open_session().session_id, tables=tables.encode()))
        return opened

    def introduce(self, buckets: Sequence[list[dict[str, Any]]]) -> None:
        """Describe to the receiver the buckets of its tables' neighbours."""
        self._post(m.Neighbours(session_id=self._open_session().session_id, buckets=list(buckets)))

    def connect(self) -> None:
        """Join the other ends of the link, after every receiver of the session was told to join."""
        self._link.connect(self._given_up)

    def _given_up(self) -> str | None:
        """Return why the receiver will not join, or None."""
        message = self._dialer.peek()
        if isinstance(message, m.Failed):
            return self._reported(self._open_session(), message.error)
        return self._dialer.lost()

    def _reported(self, session: Session, text: str) -> str:
        return f"the receiver of {session} at {self._dialer.endpoint} reported:\n{text}"

    def next_buffer(self) -> torch.Tensor:
        """Return the next buffer to fill, [bucket_bytes] uint8, once the receiver has emptied it."""
        self.wait_for_room()
        return self._memory().buffer(self._sent % 2)

    def wait_for_room(self) -> None:
        """Wait until the receiver has room for another bucket."""
        while self._sent - self._done >= 2:
            done = self._next(m.Done, f"bucket {self._done} to be taken")
            if done.index != self._done:
                raise WeightSyncError(
                    f"{self._session}: bucket {done.index} was acknowledged, expected {self._done}"
                )
            self._done += 1

    @contextlib.contextmanager
    def raise_receiver_error(self) -> Iterator[None]:
        """Turn a lost message into the error that a receiver sends before it drops its messages."""
        try:
            yield
        except MessageLost:
            while True:  # until the receiver's error, its death or the deadline raises
                self._next(m.Done, "the receiver's own error", seconds=_LAST_WORDS_SECONDS)

    def send_window(
        self, parcels: Sequence[m.BucketMessage] | None = None, *, in_flight: bool = False
    ) -> None:
        """Announce the next window.

        Args:
            parcels: messages that bring bytes from other slots; None if there are none.
            in_flight: the receiver takes the messages itself; else they are in the buffer from `next_buffer`.
        """
        session = self._open_session()
        if not in_flight:
            memory.synchronize(self._memory().device)
        self._post(
            m.WindowFilled(
                session_id=session.session_id,
                index=self._sent,
                messages=None if parcels is None else list(parcels),
            )
        )
        self._sent += 1

    def _memory(self) -> SlotLink:
        """Return the memory shared with the receiver; raise WeightSyncError if there is none."""
        if not isinstance(self._link, SlotLink):
            raise WeightSyncError(
                "this sender shares no memory with its receiver, which takes its messages itself"
            )
        return self._link

    def wait_until_taken(self) -> None:
        """Wait until the receiver has taken all windows that were sent."""
        while self._done < self._sent:
            self._next(m.Done, f"bucket {self._done} to be taken")
            self._done += 1

    def finish(self, proof: str | None = None) -> m.Verified:
        """End the windows; return after the receiver has loaded, checked and processed everything.

        `proof`: the trainer's digests of the receiver's cells (`proof.TrainerProof.exchange_digests`)."""
        session_id = self._open_session().session_id
        self._post(m.SessionEnd(session_id=session_id, num_windows=self._sent, proof=proof))
        self.wait_until_taken()
        return self._next(m.Verified, "the receiver to verify")

    def commit(self) -> None:
        """Make the version visible on this rank."""
        self._post(m.Commit(session_id=self._open_session().session_id))
        self._next(m.Committed, "the commit to be confirmed")
        self._session = None

    def abort(self, error: str, *, wait: bool = False) -> None:
        """Give the session up and drop the link's bytes; the receiver is then failed.

        `wait`: return only after the receiver released what it was lent, or is gone, or at the deadline.
        """
        if self._session is not None:
            self._post(m.Abort(session_id=self._session.session_id, error=error))
        self._link.drop()
        if self._session is None:
            return
        if wait:
            with contextlib.suppress(WeightSyncError):  # its Failed, its death or the deadline ends the wait
                while True:
                    self._next(m.Done, "the receiver to let go")
        self._session = None

    def close(self) -> None:
        """Free the buffers; the receiver must have released its mapping before."""
        self.abort("the sender was closed")
        self._dialer.close()
        self._link.close()

    def _post(self, message: m.Message) -> None:
        self._dialer.send(message)

    def _open_session(self) -> Session:
        if self._session is None:
            raise WeightSyncError("this sender has no open session; call announce first")
        return self._session

    def _next(self, kind: type[_Answer], waiting_for: str, *, seconds: float | None = None) -> _Answer:
        """Return the open session's next message, which must be of this kind; skip those of earlier ones."""
        session, mark = self._open_session(), time.monotonic()
        deadline = mark + (seconds or self._sync.deadline_seconds)
        while True:
            message = self._dialer.receive(deadline, f"{waiting_for} ({session})")
            if message.session_id != session.session_id:
                continue
            self.wait_seconds += time.monotonic() - mark
            if isinstance(message, m.Failed):
                self._session = None
                raise WeightSyncError(self._reported(session, message.error))
            if not isinstance(message, kind):
                raise WeightSyncError(
                    f"{session}: expected {kind.__name__}, the receiver sent {type(message).__name__}"
                )
            return message
