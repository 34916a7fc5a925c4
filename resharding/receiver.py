"""The receiving end of a slot: takes buckets, checks them, hands tensors to a consumer, commits or fails.

Owns the protocol, not the model: a `Consumer` loads (vLLM's is in `vllm_plugin`). It runs inside one blocking call with
a deadline on every wait. Whatever goes wrong, the consumer is told to put itself back, the sender gets the traceback,
and the state is failed until a full session commits.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Protocol

import torch

from mrl.errors import ReshardError
from resharding import memory
from resharding import messages as m
from resharding.assembly import Assembly
from resharding.channel import Listener, own_address
from resharding.digest import digest
from resharding.processes import ProcessId
from resharding.session import Progress, Session, WireTensor, wire_digest


class Consumer(Protocol):
    """What a receiver feeds."""

    def start(self, tensors: Sequence[WireTensor]) -> None:
        """A session's bytes are about to arrive."""
        ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Complete tensors, each exactly once; the consumer may keep them."""
        ...

    def finish(self) -> None:
        """Everything arrived: check completeness, process."""
        ...

    def abort(self) -> None:
        """Put loading state back so that a full resend starts clean; must not raise."""
        ...


class Receiver:
    """One per generation rank; lives as long as its process."""

    def __init__(self, *, deadline_seconds: float, device: torch.device) -> None:
        self.progress = Progress()
        self._seconds = deadline_seconds
        self._device = device
        self._listener = Listener(own_address())
        self._buffers: list[memory.Opened] = []
        self._manifests: dict[str, list[WireTensor]] = {}
        self._sender: tuple[bytes, ProcessId] | None = None
        self._spent: dict[str, float] = {}

    @property
    def address(self) -> str:
        """Where this rank's sender connects."""
        return self._listener.address

    def receive(self, session: Session, consumer: Consumer) -> m.Verified:
        """Takes one whole session; returns after commit. ReshardError carries the cause; the state is then failed."""
        self.progress.prepare(session)
        self._spent = dict.fromkeys(("wait", "copy", "load", "process"), 0.0)
        self._sender = None
        started = False
        try:
            tensors = self._accept(session)
            self.progress.receiving()
            started = True
            consumer.start(tensors)
            assembly = self._take_buckets(session, tensors, consumer)
            verified = self._finish(session, assembly, consumer)
            self.progress.verified()
            self._commit(session, verified)
            self.progress.commit()
            return verified
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            self.progress.fail(text)
            if started:
                consumer.abort()
            if self._sender is not None:
                self._listener.send(self._sender[0], m.Failed(session_id=session.session_id, error=text))
            raise

    def release(self) -> None:
        """Unmaps the buffers; the owner may free them when this has returned."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            buffer.close()

    def close(self) -> None:
        self.release()
        self._listener.close()

    # -- the phases of a session ---------------------------------------------------------------------------------

    def _accept(self, session: Session) -> list[WireTensor]:
        """Waits for this session's sender; any other sender is refused and does no harm."""
        deadline = time.monotonic() + self._seconds
        while True:
            sender, message = self._listener.receive(deadline, f"the sender of {session} to open it")
            if isinstance(message, m.Open) and message.session_id == session.session_id:
                break
            self._refuse(sender, message, f"this receiver waits for {session}")
        theirs = Session(message.session_id, message.from_version, message.to_version, message.digest)
        if theirs != session:
            reason = f"the sender opened {theirs} with digest {theirs.digest[:12]}, expected {session} with {session.digest[:12]}"
            self._listener.send(sender, m.Refused(session_id=session.session_id, reason=reason))
            raise ReshardError(reason)
        self._sender = (sender, ProcessId(message.pid, message.start_ticks))
        self._map(message.buffers)
        known = self._manifests.get(session.digest)
        self._listener.send(sender, m.Opened(session_id=session.session_id, wants_manifest=known is None))
        return known if known is not None else self._take_manifest(session)

    def _take_manifest(self, session: Session) -> list[WireTensor]:
        message = self._next(session, "the manifest")
        if not isinstance(message, m.Manifest):
            raise ReshardError(f"expected the manifest of {session}, got {message.kind}")
        tensors = [WireTensor(name, dtype, tuple(shape)) for name, dtype, shape in message.tensors]
        if wire_digest(tensors) != session.digest:
            raise ReshardError(
                f"the manifest of {session} does not have the session's digest {session.digest[:12]}"
            )
        self._manifests = {session.digest: tensors}
        return tensors

    def _take_buckets(self, session: Session, tensors: list[WireTensor], consumer: Consumer) -> Assembly:
        assembly = Assembly(tensors, device=self._device)
        expected = 0
        while True:
            message = self._next(session, f"bucket {expected}")
            if isinstance(message, m.End):
                if message.num_buckets != expected:
                    raise ReshardError(
                        f"{session}: {expected} buckets arrived, {message.num_buckets} were sent"
                    )
                return assembly
            if not isinstance(message, m.Bucket) or message.index != expected:
                raise ReshardError(f"{session}: expected bucket {expected}, got {message!r:.200}")
            copy = self._copy(message)
            self._listener.send(self._sender_id(), m.Done(session_id=session.session_id, index=message.index))
            complete = assembly.take(message.spans, copy)
            mark = time.monotonic()
            consumer.load(complete)
            self._spent["load"] += time.monotonic() - mark
            expected += 1

    def _copy(self, bucket: m.Bucket) -> torch.Tensor:
        """The bucket's bytes in memory of our own, so that its buffer is free and what is loaded is what was checked."""
        mark = time.monotonic()
        shared = self._buffers[bucket.buffer].buffer
        if bucket.used_bytes > shared.numel():
            raise ReshardError(
                f"bucket {bucket.index} claims {bucket.used_bytes} bytes of a buffer of {shared.numel()}"
            )
        copy = shared[: bucket.used_bytes].clone()
        memory.synchronize(copy.device)
        if bucket.digest is not None and digest(copy) != bucket.digest:
            raise ReshardError(
                f"bucket {bucket.index}: the {bucket.used_bytes} bytes received do not have the digest of those sent"
            )
        self._spent["copy"] += time.monotonic() - mark
        return copy

    def _finish(self, session: Session, assembly: Assembly, consumer: Consumer) -> m.Verified:
        assembly.require_complete()
        mark = time.monotonic()
        consumer.finish()
        memory.synchronize(self._device)
        self._spent["process"] += time.monotonic() - mark
        return m.Verified(
            session_id=session.session_id,
            num_tensors=assembly.num_complete,
            num_bytes=assembly.num_bytes,
            seconds=dict(self._spent),
        )

    def _commit(self, session: Session, verified: m.Verified) -> None:
        self._listener.send(self._sender_id(), verified)
        message = self._next(session, "the commit")
        if not isinstance(message, m.Commit):
            raise ReshardError(f"expected the commit of {session}, got {message.kind}")
        self._listener.send(self._sender_id(), m.Committed(session_id=session.session_id))

    # -- pieces --------------------------------------------------------------------------------------------------

    def _next(self, session: Session, waiting_for: str) -> m.AnyMessage:
        """The next message of this session's sender; others are refused meanwhile. An Abort is raised."""
        assert self._sender is not None
        mark = time.monotonic()
        while True:
            sender, message = self._listener.receive(
                mark + self._seconds, f"{waiting_for} of {session}", self._sender[1]
            )
            if sender != self._sender[0]:
                self._refuse(sender, message, f"{session} is in progress with process {self._sender[1].pid}")
                continue
            self._spent["wait"] += time.monotonic() - mark
            if isinstance(message, ReshardError):
                raise message
            if message.session_id != session.session_id:
                raise ReshardError(f"a message of session {message.session_id[:8]} inside {session}")
            if isinstance(message, m.Abort):
                raise ReshardError(f"the sender gave {session} up:\n{message.error}")
            return message

    def _refuse(self, sender: bytes, message: m.AnyMessage | ReshardError, why: str) -> None:
        """Answers an Open or a malformed message; the rest of a refused or dead session is dropped."""
        if isinstance(message, ReshardError):
            self._listener.send(sender, m.Refused(session_id="", reason=str(message)))
        elif isinstance(message, m.Open):
            reason = f"session {message.session_id[:8]} (version {message.from_version} -> {message.to_version}) refused: {why}"
            self._listener.send(sender, m.Refused(session_id=message.session_id, reason=reason))

    def _sender_id(self) -> bytes:
        assert self._sender is not None
        return self._sender[0]

    def _map(self, descriptions: list[dict]) -> None:
        """Opens the sender's buffers, once: the same segments are recognised in later sessions."""
        if len(descriptions) != 2:
            raise ReshardError(f"a slot has two buffers, the sender offers {len(descriptions)}")
        if [b.token for b in self._buffers] == [d.get("token") for d in descriptions]:
            return
        self.release()
        for description in descriptions:
            self._buffers.append(memory.open_segment(description))
