"""One session from the trainers' side: open, move, finish, commit; and abort wherever it breaks.

Every rank of the group calls `run_session` together; either all return, committed, or all raise. A rank may
feed several engine ranks (separate pools) or none.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import Parcel


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What a rank sent to its receivers in a session."""

    num_bytes: int
    num_windows: int
    seconds: float
    """Packing, messages, unpacking."""
    pack_seconds: float
    """What this rank's own copies took of `seconds`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendStats:
    """What one rank's weight sync took, in seconds."""

    moved: Moved
    seconds: float
    wait_seconds: float
    """What this rank waited for its receivers."""
    commit_seconds: float
    """From every rank's verification to every rank's commit."""
    prove_seconds: float
    """Digests of this rank's own parameters, and their exchange."""
    receiver_seconds: dict[str, float]
    """wait, copy, load, process on the receivers' side; the longest."""

    @property
    def figures(self) -> dict[str, float]:
        """By metric name: seconds of this rank, bytes of this slot."""
        seconds = {f"{name}_seconds": value for name, value in self.receiver_seconds.items()}
        return seconds | {
            "bytes": float(self.moved.num_bytes),
            "move_seconds": self.moved.seconds,
            "pack_seconds": self.moved.pack_seconds,
            "commit_seconds": self.commit_seconds,
            "prove_seconds": self.prove_seconds,
            "sender_wait_seconds": self.wait_seconds,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """An engine rank that this trainer rank feeds through a session, and what it is told will come."""

    sender: WeightSender
    tables: Tables
    parcels: Sequence[Sequence[Parcel]] | None = None
    """By window: where its bytes come from other ranks' messages. None: this rank fills its bucket."""
    receiver: int = 0
    """Its number among all engine ranks."""
    lease: Sequence[dict[str, Any]] = ()
    """The memory that the receiver reads; none of it between machines."""


def run_session(
    ranks: RankGroup,
    session: Session,
    feeds: Sequence[Feed],
    move: Callable[[], Moved],
    prove: Callable[[], Sequence[str]],
    *,
    mesh: TrainerMesh | None = None,
    at_once: bool = False,
) -> SendStats:
    """Runs one session; `move` sends everything in between. A rank that feeds nobody still belongs to the
    `mesh`.

    `at_once`: on all ranks, which have met: all lies in the feeds' leases, and receivers begin when they are told of the session.
    `prove`: for every feed, what the trainer ranks' own parameters hold in its cells, after everything was
    sent and while nothing may change it; all ranks compute it together, in a session that asks for it."""
    started = time.monotonic()
    senders = [feed.sender for feed in feeds]
    try:
        ranks.together(lambda: _open(session, feeds, at_once))
        if not at_once:
            ranks.together(lambda: _connect(senders, session, mesh))
        moved = move()
        proofs, proving = _timed(prove) if session.full else ([None] * len(senders), 0.0)
        verified = ranks.together(lambda: [s.finish(p) for s, p in zip(senders, proofs, strict=True)])
        mark = time.monotonic()
        ranks.together(lambda: [sender.commit() for sender in senders])
    except BaseException as error:
        for sender in senders:
            sender.abort("".join(traceback.format_exception(error)), wait=True)
        if mesh is not None:
            mesh.drop()
        traceback.clear_frames(error.__traceback__)  # else whoever keeps the error keeps the buffers mapped
        raise
    return SendStats(
        moved=moved,
        seconds=time.monotonic() - started,
        commit_seconds=time.monotonic() - mark,
        prove_seconds=proving,
        wait_seconds=max((sender.wait_seconds for sender in senders), default=0.0),
        receiver_seconds=_longest([v.seconds for v in verified]),
    )


def _timed(prove: Callable[[], Sequence[str]]) -> tuple[Sequence[str], float]:
    """The proofs and the seconds that they took."""
    started = time.monotonic()
    return prove(), time.monotonic() - started


def _open(session: Session, feeds: Sequence[Feed], at_once: bool) -> None:
    """All receivers are told before any is waited for: one that is gone then leaves nobody waiting for a session that never
    opens, because the others hear of its end."""
    for feed in feeds:
        feed.sender.announce(session, feed.tables, lease=feed.lease, at_once=at_once)
    for feed in feeds:
        feed.sender.accepted(feed.tables)


def _connect(senders: Sequence[WeightSender], session: Session, mesh: TrainerMesh | None) -> None:
    for sender in senders:
        sender.connect()
    if mesh is not None and not senders:
        mesh.connect(session.session_id, lambda: None)


def _longest(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(r[name] for r in reports) for name in (reports[0] if reports else ())}
