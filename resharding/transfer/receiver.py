"""The receiving end of a slot: takes windows, checks them, has a consumer copy them, commits or fails.

Owns the protocol, not the model: a consumer loads (vLLM's are in `vllm/modules.py`). It runs inside one
blocking call with a deadline on every wait. Whatever goes wrong, the consumer is told to put itself back, the
sender gets the traceback, and the state is failed until a full session commits.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Protocol

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.conversation import SessionConversation
from mrl.resharding.transfer.lease import Lease, renewed
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.session import ReceiverProgress, ReceiverState, Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.wire import memory
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Listener
from mrl.resharding.wire.mesh import MessageLost
from mrl.resharding.wire.mesh_link import KINDS, MeshInbox
from mrl.resharding.wire.slot_link import SlotInbox

_LAST_WORDS_SECONDS = 2.0
"""How long a receiver whose bytes did not come listens for its sender's own error."""


class Consumer(Protocol):
    """What a receiver feeds with the windows of a plan: an engine's modules (`vllm/modules.py`), or bare
    storages."""

    @property
    def manifest(self) -> RankManifest | None:
        """What this engine rank itself says of its loader layout; None where it was never asked."""
        ...

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        """A session's bytes are about to arrive. `proof` wants every target of the tables after its last byte
        and before anything is made of it (`EngineProof.look`): parameters in loader layout, whole tensors
        before they are loaded."""
        ...

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        """Runs one window's copies, from flat leased tensors and from the filled bytes of the bucket; loads
        the whole tensors that are complete with it."""
        ...

    def finish(self) -> None:
        """Everything arrived: check completeness, process."""
        ...

    def abort(self) -> None:
        """Put loading state back so that a full resend starts clean; must not raise."""
        ...


class Receiver:
    """The receiving end of one engine rank; it lives as long as its process."""

    def __init__(self, *, deadline_seconds: float, device: torch.device, host: str | None = None) -> None:
        """`host`: this machine's address, for a sender that does not share this slot's memory."""
        self.progress = ReceiverProgress()
        self.deadline_seconds = deadline_seconds
        """The longest wait for the sender."""
        self._device = device
        self._listener = Listener(host)
        self._inbox: SlotInbox | MeshInbox | None = None
        self._known_tables: dict[tuple[str, str], Tables] = {}
        self._known_proofs: dict[tuple[str, str], EngineProof] = {}
        self._proof: EngineProof | None = None
        """What proves the open session; None in one that is not proved."""
        self._lease: Lease | None = None
        self._spent: dict[str, float] = {}

    @property
    def address(self) -> str:
        """Where this rank's sender connects."""
        return self._listener.address

    def receive(self, session: Session, consumer: Consumer) -> dict[str, float]:
        """Takes one whole session; returns after commit, with the seconds of its waits and works.

        Any error is raised after the consumer was put back, the lease ended and the sender told; the state is
        then failed.
        """
        self.progress.prepare(session)
        self._spent = dict.fromkeys(("copy", "load", "process"), 0.0)
        conversation = SessionConversation(self._listener, session, self.deadline_seconds)
        try:
            opening = self._accept(conversation)
            tables = self._tables(conversation, opening)
            self._open_inbox().connect(conversation.given_up)
            self.progress.receiving()
            self._proof = self._proof_of(tables, consumer.manifest) if session.full else None
            self._take_windows(conversation, opening, tables, consumer)
            seconds = self._finish(conversation, consumer)
            self._commit(conversation, seconds)
            return seconds
        except BaseException as error:
            self._fail(conversation, error, consumer)
            raise

    def _fail(self, conversation: SessionConversation, error: BaseException, consumer: Consumer) -> None:
        begun = self.progress.state in (ReceiverState.RECEIVING, ReceiverState.VERIFIED)
        text = "".join(traceback.format_exception(error))
        self.progress.fail()
        traceback.clear_frames(
            error.__traceback__
        )  # frames of the failed call would keep leased memory mapped
        if begun:
            consumer.abort()
        self._end_lease()
        if conversation.begun:
            conversation.send(m.Failed(session_id=conversation.session.session_id, error=text))
        if self._inbox is not None:
            self._inbox.drop()  # after the error was sent: whoever misses a message asks for it

    def drop(self) -> None:
        """The weights were given up (a sleep): nothing is served until a session commits again."""
        if self.progress.serving:
            self.progress.fail()

    def release(self) -> None:
        """Unmaps buffers and leased memory; the owner may free them when this has returned."""
        self._end_lease()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    def close(self) -> None:
        self.release()
        self._listener.close()

    # -- the phases of a session ---------------------------------------------------------------------------------

    def _accept(self, conversation: SessionConversation) -> m.Open:
        opening = conversation.accept()
        self._map(opening.buffers)
        return opening

    def _proof_of(self, tables: Tables, manifest: RankManifest | None) -> EngineProof:
        """How what the tables bring is proved, by this rank's own manifest; kept for sessions with the same."""
        if manifest is None:
            raise WeightSyncError(
                "this engine rank was never asked where its loaders put the weights: nothing can be proved here"
            )
        key = (tables.digest, manifest.digest)
        if key not in self._known_proofs:
            self._known_proofs = {key: EngineProof(tables.cells, tables.targets, manifest)}
        self._known_proofs[key].start()
        return self._known_proofs[key]

    def _tables(self, conversation: SessionConversation, opening: m.Open) -> Tables:
        """This slot's tables, from the sender or from an earlier session with the same digests, checked
        against memory."""
        session = conversation.session
        key = (session.digest, opening.tables_digest)
        tables = self._known_tables.get(key)
        conversation.send(m.Opened(session_id=session.session_id, wants_tables=tables is None))
        if tables is None:
            message = conversation.next("the plan's tables")
            if not isinstance(message, m.PlanTables):
                raise WeightSyncError(f"expected the tables of {session}, got {message.kind}")
            tables = Tables.decode(message.tables)
            if tables.digest != opening.tables_digest:
                raise WeightSyncError(
                    f"the tables of {session} do not have the digest {opening.tables_digest[:12]}"
                )
            self._known_tables = {key: tables}
        tables.check([d["num_bytes"] for d in opening.lease], self._open_inbox().num_bytes)
        return tables

    def _take_windows(
        self, conversation: SessionConversation, opening: m.Open, tables: Tables, consumer: Consumer
    ) -> None:
        """Everything is written and proved. What has to be unmapped is so after the last window, before anything is
        acknowledged as complete."""
        if opening.at_once and any(window.bucket_bytes for window in tables.windows):
            raise WeightSyncError(f"{conversation.session} sends nothing, and its windows bring bytes")
        self._lease = renewed(self._lease, opening.lease)
        sources = [self._lease.flat(tensor) for tensor in tables.sources]
        consumer.start(tables, self._proof)
        for expected in range(len(tables.windows)):
            if opening.at_once:
                received = torch.empty(0, dtype=torch.uint8, device=self._device)
            else:
                received = self._window(conversation, tables.windows[expected].bucket_bytes, expected)
            mark = time.monotonic()
            consumer.apply(expected, sources, received)
            memory.synchronize(self._device)
            self._spent["load"] += time.monotonic() - mark
            conversation.send(m.Done(session_id=conversation.session.session_id, index=expected))
        sources.clear()
        if not self._lease.stays:
            self._end_lease()
        message, taken = conversation.next("the end"), len(tables.windows)
        if not isinstance(message, m.SessionEnd) or message.num_windows != taken:
            raise WeightSyncError(
                f"{conversation.session}: {taken} windows were taken, expected their end, got {message!r:.200}"
            )
        self._prove(message)

    def _window(self, conversation: SessionConversation, size: int, expected: int) -> torch.Tensor:
        """[size] uint8: what the next window brings from elsewhere, once the sender says that it is there."""
        message = conversation.next(f"window {expected}")
        if not isinstance(message, m.WindowFilled) or message.index != expected:
            raise WeightSyncError(f"{conversation.session}: expected window {expected}, got {message!r:.200}")
        mark = time.monotonic()
        received = self._bytes(conversation, message.buffer, size, message.parcels)
        self._spent["copy"] += time.monotonic() - mark
        return received

    def _end_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _prove(self, end: m.SessionEnd) -> None:
        """WeightSyncError unless the engine holds what the trainer's own parameters hold, in a session that
        is proved."""
        if self._proof is None:
            return
        if end.proof is None:
            raise WeightSyncError("the session is to be proved, and its end brings no proof")
        self._proof.compare(end.proof)

    def _finish(self, conversation: SessionConversation, consumer: Consumer) -> dict[str, float]:
        mark = time.monotonic()
        consumer.finish()
        memory.synchronize(self._device)
        self._spent["process"] += time.monotonic() - mark
        return self._spent | {"wait": conversation.wait_seconds}

    def _commit(self, conversation: SessionConversation, seconds: dict[str, float]) -> None:
        self.progress.verified()
        conversation.send(m.Verified(session_id=conversation.session.session_id, seconds=seconds))
        message = conversation.next("the commit")
        if not isinstance(message, m.Commit):
            raise WeightSyncError(f"expected the commit of {conversation.session}, got {message.kind}")
        conversation.send(m.Committed(session_id=conversation.session.session_id))
        self.progress.commit()

    # -- pieces --------------------------------------------------------------------------------------------------

    def _bytes(
        self,
        conversation: SessionConversation,
        which: int,
        num_bytes: int,
        parcels: Sequence[m.Parcel] | None = None,
    ) -> torch.Tensor:
        """A bucket's bytes. A sender that gives up says why and drops its messages: its reason is what is
        raised."""
        try:
            return self._open_inbox().take(which, num_bytes, parcels)
        except MessageLost:
            while True:  # until its Abort, its end or its silence is raised
                conversation.next("the sender's own error", seconds=_LAST_WORDS_SECONDS)

    def _open_inbox(self) -> SlotInbox | MeshInbox:
        assert self._inbox is not None
        return self._inbox

    def _map(self, descriptions: list[dict]) -> None:
        """Opens what the sender fills, once: the same is recognised in later sessions."""
        if self._inbox is None or not self._inbox.is_for(descriptions):
            self.release()
            if descriptions[0]["kind"] in KINDS:
                device, seconds = self._device, self.deadline_seconds
                self._inbox = MeshInbox(descriptions, device=device, deadline_seconds=seconds)
            else:
                self._inbox = SlotInbox(descriptions)
