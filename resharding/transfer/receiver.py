"""The receiving end of a slot: takes windows, checks them, lets a consumer copy them, and commits or fails.

Owns the protocol, not the model: a consumer loads (vLLM's: `vllm/modules.py`). It runs inside one blocking
call with a deadline on every wait. After any error the consumer restores itself, the sender gets the
traceback, and the state is failed until a full session commits. With `stage`, a thread takes the bytes before
that call, while the engine serves (staging.py).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Protocol

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.changes import HeldMessages
from mrl.resharding.transfer.conversation import SessionConversation
from mrl.resharding.transfer.copies import wire_arrays
from mrl.resharding.transfer.lease import Lease, reuse_or_open_lease
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.session import ReceiverProgress, ReceiverState, Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.transfer.staging import Staging, Taken
from mrl.resharding.wire import memory
from mrl.resharding.wire import messages as m
from mrl.resharding.wire.channel import Listener
from mrl.resharding.wire.mesh import MessageLost
from mrl.resharding.wire.mesh_link import KINDS, MeshInbox
from mrl.resharding.wire.shared_buckets import NeighbourBuckets
from mrl.resharding.wire.slot_link import SlotInbox

_LAST_WORDS_SECONDS = 2.0
"""How long a receiver with missing bytes waits for its sender's own error."""


class Consumer(Protocol):
    """Takes the windows of a plan: an engine's modules (`vllm/modules.py`) or bare storages."""

    @property
    def manifest(self) -> RankManifest | None:
        """This engine rank's own description of its loader layout; None if it was never traced."""
        ...

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        """Prepare for a session's bytes.

        Call `proof.look` on every target after its last byte and before processing: parameters in loader
        layout, whole tensors before they are loaded."""
        ...

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        """Run one window's copies from flat leased tensors and the filled bytes of the bucket.

        Loads the whole tensors that are complete after it."""
        ...

    def finish(self) -> None:
        """Check that everything arrived, then process it."""
        ...

    def abort(self) -> None:
        """Restore the loading state so that a full resend starts clean; must not raise."""
        ...


class Receiver:
    """The receiving end of one engine rank; it lives as long as its process."""

    def __init__(self, *, deadline_seconds: float, device: torch.device, host: str | None = None) -> None:
        """`host`: this machine's address, for a sender that does not share this slot's memory; else None."""
        self.progress = ReceiverProgress()
        self.deadline_seconds = deadline_seconds
        """Longest wait for the sender."""
        self._device = device
        self._listener = Listener(host)
        self._inbox: SlotInbox | MeshInbox | None = None
        self._known_tables: dict[tuple[str, str], Tables] = {}
        self._known_proofs: dict[tuple[str, str], EngineProof] = {}
        self._proof: EngineProof | None = None
        """Proof of the open session; None if the session has none."""
        self._staged: Staging | None = None
        """Session whose bytes a thread takes."""
        self._lease: Lease | None = None
        self._neighbours: list[NeighbourBuckets] = []
        self._held = HeldMessages()
        self._spent: dict[str, float] = {}

    @property
    def address(self) -> str:
        """Address that this rank's sender connects to."""
        return self._listener.address

    def stage(self, session: Session) -> None:
        """Start to take a session's bytes in a thread, beside the weights; `receive` then loads them.

        An error of the thread gives the session up and changes nothing else: the engine serves as before.
        Raises WeightSyncError if the session does not follow the committed version."""
        self.progress.require_next(session)
        self._give_up_staged()
        self._spent = dict.fromkeys(("copy", "load", "process"), 0.0)
        self._staged = Staging(self._listener, session, self.deadline_seconds, self._device, self._stage)

    def _stage(self, conversation: SessionConversation) -> Taken:
        """Take all windows without loading them."""
        try:
            opening, tables = self._begin(conversation)
            if opening.lease or opening.at_once:
                raise WeightSyncError(f"{conversation.session} lends memory, which only `receive` reads")
            inbox = self._open_inbox()
            for number, window in enumerate(tables.windows):
                inbox.keep(number, self._window(conversation, window.bucket_bytes, number))
                memory.synchronize(self._device)
                conversation.send(m.Done(session_id=conversation.session.session_id, index=number))
            return Taken(opening, tables)
        except BaseException as error:
            self._fail(conversation, error)
            raise

    def receive(self, session: Session, consumer: Consumer) -> dict[str, float]:
        """Take one whole session, or load a staged one; return the seconds of its waits and phases after
        commit.

        After any error the consumer is restored, the lease ended, the sender informed and the state failed.
        If staging failed, the engine serves as before.
        """
        staged = self._staged if self._staged is not None and self._staged.session == session else None
        self.progress.require_next(session)
        if staged is None:
            self._give_up_staged()
            self._spent = dict.fromkeys(("copy", "load", "process"), 0.0)
            conversation = SessionConversation(self._listener, session, self.deadline_seconds)
        else:
            self._staged, conversation = None, staged.conversation
        taken = None if staged is None else staged.taken()
        self.progress.prepare(session)
        try:
            opening, tables = self._begin(conversation) if taken is None else (taken.opening, taken.tables)
            self.progress.receiving()
            self._proof = self._proof_of(tables, consumer.manifest) if session.full else None
            self._take_windows(conversation, opening, tables, consumer, are_kept=taken is not None)
            seconds = self._finish(conversation, consumer)
            self._commit(conversation, seconds)
            return seconds
        except BaseException as error:
            self._fail(conversation, error, consumer)
            raise

    def _begin(self, conversation: SessionConversation) -> tuple[m.Open, Tables]:
        """Accept the sender, and join all other ends."""
        opening = self._accept(conversation)
        tables = self._tables(conversation, opening)
        if tables.neighbours:
            self._meet_neighbours(conversation, tables)
        self._open_inbox().connect(conversation.peer_failure)
        return opening, tables

    def _fail(
        self, conversation: SessionConversation, error: BaseException, consumer: Consumer | None = None
    ) -> None:
        """Give the session up and send the error; if a `consumer` may have loaded bytes, restore it, too."""
        begun = self.progress.state in (ReceiverState.RECEIVING, ReceiverState.VERIFIED)
        if consumer is not None:
            self.progress.fail()
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(
            error.__traceback__
        )  # frames of the failed call would keep leased memory mapped
        if consumer is not None and begun:
            consumer.abort()
        self._end_lease()
        if not conversation.accepted:
            return
        conversation.send(m.Failed(session_id=conversation.session.session_id, error=text))
        if self._inbox is not None:
            self._inbox.drop()  # after the error: a sender that loses a message waits for that error

    def drop(self) -> None:
        """Stop serving until a session commits again, because the weights were given up (sleep)."""
        if self.progress.serving:
            self.progress.fail()

    def _give_up_staged(self) -> None:
        """End a session that was staged and will not be loaded."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.give_up(lambda: None if self._inbox is None else self._inbox.drop())

    def release(self) -> None:
        """Unmap buffers and leased memory; their owner may free them after it returns."""
        self._give_up_staged()
        self._unmap()

    def _unmap(self) -> None:
        self._end_lease()
        _close_all(self._neighbours)
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    def close(self) -> None:
        self.release()
        self._listener.close()

    # -- the phases of a session -----------------------------------------------------------------------------

    def _accept(self, conversation: SessionConversation) -> m.Open:
        opening = conversation.accept()
        self._map(opening.buffers)
        return opening

    def _proof_of(self, tables: Tables, manifest: RankManifest | None) -> EngineProof:
        """Return the proof of these tables by this rank's own manifest; cached while both stay the same."""
        if manifest is None:
            raise WeightSyncError(
                "a full session needs this engine rank's manifest to prove the weights, but none was traced; "
                "call engine_manifests first"
            )
        key = (tables.digest, manifest.digest)
        if key not in self._known_proofs:
            self._known_proofs = {key: EngineProof(tables.cells, tables.targets, manifest)}
        self._known_proofs[key].start()
        return self._known_proofs[key]

    def _tables(self, conversation: SessionConversation, opening: m.Open) -> Tables:
        """Return this slot's tables from the sender or an earlier session, checked against memory."""
        session = conversation.session
        key = (session.digest, opening.tables_digest)
        tables = self._known_tables.get(key)
        conversation.send(
            m.Opened(
                session_id=session.session_id,
                wants_tables=tables is None,
                buckets=self._open_inbox().share(session.session_id),
                held_version=self._held.version(opening.tables_digest),
            )
        )
        self._held.begin(opening.tables_digest)
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
        self,
        conversation: SessionConversation,
        opening: m.Open,
        tables: Tables,
        consumer: Consumer,
        *,
        are_kept: bool,
    ) -> None:
        """Write and prove all windows; end a lease that must end before the receiver reports completion.

        `are_kept`: they were staged, and acknowledged then."""
        if opening.at_once and any(window.bucket_bytes for window in tables.windows):
            raise WeightSyncError(f"{conversation.session} sends no messages, but its windows need some")
        self._lease = reuse_or_open_lease(self._lease, opening.lease)
        sources = [self._lease.flat(tensor) for tensor in tables.sources]
        consumer.start(tables, self._proof)
        for expected in range(len(tables.windows)):
            if opening.at_once:
                received = torch.empty(0, dtype=torch.uint8, device=self._device)
            elif are_kept:
                received = self._open_inbox().kept(expected, tables.windows[expected].bucket_bytes)
            else:
                received = self._window(conversation, tables.windows[expected].bucket_bytes, expected)
            arrays = self._neighbours_arrays(conversation, expected) if tables.neighbours else []
            mark = time.monotonic()
            consumer.apply(expected, [*sources, *arrays], received)
            arrays.clear()
            memory.synchronize(self._device)
            self._spent["load"] += time.monotonic() - mark
            if not are_kept:
                conversation.send(m.Done(session_id=conversation.session.session_id, index=expected))
        sources.clear()
        if not self._lease.reusable:
            self._end_lease()
        message, taken = conversation.next("the end"), len(tables.windows)
        if not isinstance(message, m.SessionEnd) or message.num_windows != taken:
            raise WeightSyncError(
                f"{conversation.session}: expected the end after {taken} windows, got {message!r:.200}"
            )
        self._prove(message)

    def _window(self, conversation: SessionConversation, size: int, expected: int) -> torch.Tensor:
        """Return [size] uint8, the next window's bytes from other slots, once the sender announces them.

        If the sender gives up, which drops its messages, raise its reason."""
        message = conversation.next(f"window {expected}")
        if not isinstance(message, m.WindowFilled) or message.index != expected:
            raise WeightSyncError(f"{conversation.session}: expected window {expected}, got {message!r:.200}")
        mark = time.monotonic()
        held = self._held.window(expected) if self._open_inbox().packs else None
        try:
            received = self._open_inbox().take(expected, size, message.messages, held)
        except MessageLost:
            while True:  # until its Abort, its death or the deadline raises
                conversation.next("the sender's own error", seconds=_LAST_WORDS_SECONDS)
        self._spent["copy"] += time.monotonic() - mark
        return received

    def _meet_neighbours(self, conversation: SessionConversation, tables: Tables) -> None:
        """Open the buckets of other engine ranks, or keep those of an earlier session."""
        message = conversation.next("the neighbours' buckets")
        if not isinstance(message, m.Neighbours) or len(message.buckets) != len(tables.neighbours):
            raise WeightSyncError(f"{conversation.session}: expected the neighbours, got {message!r:.200}")
        kept = len(self._neighbours) == len(message.buckets) and all(
            opened.is_for(described)
            for opened, described in zip(self._neighbours, message.buckets, strict=True)
        )
        if not kept:
            _close_all(self._neighbours)
            for described in message.buckets:
                self._neighbours.append(NeighbourBuckets(described))

    def _neighbours_arrays(self, conversation: SessionConversation, window: int) -> list[torch.Tensor]:
        """Wait for a window's bytes in the neighbours' buckets; return these as arrays by wire dtype."""
        mark, session_id = time.monotonic(), conversation.session.session_id
        arrays: list[torch.Tensor] = []
        for neighbour in self._neighbours:
            bucket = neighbour.bucket(
                session_id, window, deadline_seconds=self.deadline_seconds, lost=conversation.peer_failure
            )
            arrays += wire_arrays(bucket)
        self._spent["copy"] += time.monotonic() - mark
        return arrays

    def _end_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _prove(self, end: m.SessionEnd) -> None:
        """If the session has a proof, raise WeightSyncError unless the engine has the trainer's weights."""
        if self._proof is None:
            return
        if end.proof is None:
            raise WeightSyncError("the session must be proved, but its end message has no proof")
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
        if self._open_inbox().packs:
            self._held.commit(conversation.session.to_version)

    # -- pieces ----------------------------------------------------------------------------------------------

    def _open_inbox(self) -> SlotInbox | MeshInbox:
        assert self._inbox is not None
        return self._inbox

    def _map(self, descriptions: list[dict]) -> None:
        """Open the sender's buffers, or keep those of an earlier session if they are the same."""
        if self._inbox is None or not self._inbox.is_for(descriptions):
            self._unmap()
            if descriptions[0]["kind"] in KINDS:
                device, seconds = self._device, self.deadline_seconds
                self._inbox = MeshInbox(descriptions, device=device, deadline_seconds=seconds)
            else:
                self._inbox = SlotInbox(descriptions)


def _close_all(neighbours: list[NeighbourBuckets]) -> None:
    """Unmap the neighbours' buckets and forget them."""
    while neighbours:
        neighbours.pop().close()
