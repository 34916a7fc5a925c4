"""The sending end of a slot: two buffers, allocated once, one filled while the other is unpacked.

Owns the protocol; what fills the buffers is its caller's (`gather`, later the static plan).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from mrl.config.sync import SyncSection
from mrl.errors import ReshardError
from resharding import memory
from resharding import messages as m
from resharding.channel import Dialer, listener_of
from resharding.digest import digest
from resharding.processes import ProcessId
from resharding.session import Session, WireTensor
from resharding.tables import Tables

_Answer = TypeVar("_Answer", bound=m.Message)


def _announcement(session: Session, content: Sequence[WireTensor] | Tables) -> m.Message:
    if isinstance(content, Tables):
        return m.PlanTables(session_id=session.session_id, tables=content.encode())
    rows = [(t.name, t.dtype, list(t.shape)) for t in content]
    return m.Manifest(session_id=session.session_id, tensors=rows)


class WeightSender:
    """Feeds one generation rank. One session at a time: open, then next_buffer/send in turn, finish, commit or abort."""

    def __init__(self, address: str, sync: SyncSection, *, device: torch.device | str = "cpu") -> None:
        """`address`: what the engine's `prepare_sync` gave for this slot."""
        self.address = address
        self._sync = sync
        self._dialer = Dialer(address)
        self._segments = [memory.allocate(sync.bucket_bytes, torch.device(device)) for _ in range(2)]
        self._session: Session | None = None
        self._peer = listener_of(address)
        self._sent = 0
        self._done = 0
        self.wait_seconds = 0.0

    @property
    def bucket_bytes(self) -> int:
        return self._sync.bucket_bytes

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._segments[0].buffer.device

    def open(
        self,
        session: Session,
        content: Sequence[WireTensor] | Tables,
        *,
        lease: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Announces the session; returns when the receiver accepted it and was told what will come.

        Planned mode: `content` is the slot's tables and `lease` describes the trainer's memory (`lease.describe_*`).
        """
        if self._session is not None:
            raise ReshardError(f"{session} refused: this sender has {self._session} open")
        own = ProcessId.own()
        self._sent, self._done, self.wait_seconds = 0, 0, 0.0
        self._session = session
        self._dialer.send(
            m.Open(
                session_id=session.session_id,
                from_version=session.from_version,
                to_version=session.to_version,
                digest=session.digest,
                pid=own.pid,
                start_ticks=own.start_ticks,
                buffers=[s.export() for s in self._segments],
                lease=None if lease is None else list(lease),
                tables_digest=content.digest() if isinstance(content, Tables) else "",
            )
        )
        opened = self._next(m.Opened, "the receiver to accept")
        if opened.wants_manifest:
            self._dialer.send(_announcement(session, content))

    def next_buffer(self) -> torch.Tensor:
        """[bucket_bytes] uint8 to fill next; waits until the receiver is done with what was in it."""
        while self._sent - self._done >= 2:
            done = self._next(m.Done, f"bucket {self._done} to be taken")
            if done.index != self._done:
                raise ReshardError(
                    f"{self._session}: bucket {done.index} was acknowledged instead of {self._done}"
                )
            self._done += 1
        return self._segments[self._sent % 2].buffer

    def send(self, spans: Sequence[m.Span], used_bytes: int) -> None:
        """Hands the buffer `next_buffer` gave to the receiver."""
        which = 1 if self._sent % 2 else 0
        used = self._segments[which].buffer[:used_bytes]
        memory.synchronize(used.device)
        self._dialer.send(
            m.Bucket(
                session_id=self._open_session().session_id,
                index=self._sent,
                buffer=which,
                used_bytes=used_bytes,
                spans=list(spans),
                digest=digest(used) if self._sync.digests else None,
            )
        )
        self._sent += 1

    def send_window(self, received_bytes: int) -> None:
        """Planned mode: the buffer `next_buffer` gave holds what this slot received in the next window."""
        which = 1 if self._sent % 2 else 0
        received = self._segments[which].buffer[:received_bytes]
        memory.synchronize(received.device)
        checked = self._sync.digests and received_bytes > 0
        self._dialer.send(
            m.Window(
                session_id=self._open_session().session_id,
                index=self._sent,
                buffer=which,
                digest=digest(received) if checked else None,
            )
        )
        self._sent += 1

    def finish(self) -> m.Verified:
        """No more buckets; returns when the receiver has loaded, checked and processed everything."""
        self._dialer.send(m.End(session_id=self._open_session().session_id, num_buckets=self._sent))
        while self._done < self._sent:
            self._next(m.Done, f"bucket {self._done} to be taken")
            self._done += 1
        return self._next(m.Verified, "the receiver to verify")

    def commit(self) -> None:
        """Lets the version become visible on this rank."""
        self._dialer.send(m.Commit(session_id=self._open_session().session_id))
        self._next(m.Committed, "the commit to be confirmed")
        self._session = None

    def abort(self, error: str, *, wait: bool = False) -> None:
        """Gives the session up; the receiver's state is then failed. Without an open session nothing happens.

        `wait`: returns only when the receiver has let go of everything it was lent, or is gone, or at the deadline.
        """
        if self._session is None:
            return
        self._dialer.send(m.Abort(session_id=self._session.session_id, error=error))
        if wait:
            with contextlib.suppress(ReshardError):  # its Failed, its end or the deadline: all end the wait
                while True:
                    self._next(m.Done, "the receiver to let go")
        self._session = None

    def close(self) -> None:
        """Frees the buffers; the receiver must have released its mapping before."""
        self.abort("the sender was closed")
        self._dialer.close()
        for segment in self._segments:
            segment.close()

    def _open_session(self) -> Session:
        if self._session is None:
            raise ReshardError("this sender has no open session; call open first")
        return self._session

    def _next(self, kind: type[_Answer], waiting_for: str) -> _Answer:
        """The next message of the open session, of the expected kind; answers to earlier sessions are dropped."""
        session, mark = self._open_session(), time.monotonic()
        while True:
            message = self._dialer.receive(
                mark + self._sync.deadline_seconds, f"{waiting_for} ({session})", self._peer
            )
            if message.session_id != session.session_id:
                continue
            self.wait_seconds += time.monotonic() - mark
            if isinstance(message, m.Refused | m.Failed):
                self._session = None
                text = message.reason if isinstance(message, m.Refused) else message.error
                raise ReshardError(f"the receiver of {session} at {self.address} said:\n{text}")
            if not isinstance(message, kind):
                raise ReshardError(
                    f"{session}: expected {kind.__name__}, the receiver sent {type(message).__name__}"
                )
            return message
