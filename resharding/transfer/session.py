"""A weight sync from one version to the next, and the states of a receiving engine. Pure.

Failed is sticky: an engine that took any bytes and did not commit serves nothing until a full resend commits.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid

from mrl.errors import WeightSyncError


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One weight sync; sender and receiver must agree on every field."""

    session_id: str
    from_version: int | None
    """The receiver's last committed version, -1 if it has none. None: receivers may have different ones,
    because one was lost or joins late."""
    to_version: int
    digest: str
    """Digest of the plan."""
    full: bool = True
    """Commit only after the engine's weights were compared with the trainer's parameters (`proof`)."""

    @classmethod
    def new(cls, from_version: int | None, to_version: int, digest: str, *, full: bool = True) -> Session:
        """Return a session with a fresh random id."""
        return cls(uuid.uuid4().hex, from_version, to_version, digest, full)

    def __str__(self) -> str:
        start = "any" if self.from_version is None else self.from_version
        return f"session {self.session_id[:8]} (version {start} -> {self.to_version})"


class ReceiverState(enum.Enum):
    """State of a receiver."""

    IDLE = "idle"
    """Nothing has arrived yet."""
    PREPARED = "prepared"
    """A session was announced; no bytes were taken."""
    RECEIVING = "receiving"
    """Bytes are arriving: the weights are of two versions."""
    VERIFIED = "verified"
    """Everything arrived and was checked; the version is not visible yet."""
    COMMITTED = "committed"
    """The version is visible."""
    FAILED = "failed"
    """The weights are of no version; only a full session that commits leaves this state."""


_NEXT = {
    ReceiverState.IDLE: {ReceiverState.PREPARED},
    ReceiverState.PREPARED: {ReceiverState.RECEIVING, ReceiverState.FAILED},
    ReceiverState.RECEIVING: {ReceiverState.VERIFIED, ReceiverState.FAILED},
    ReceiverState.VERIFIED: {ReceiverState.COMMITTED, ReceiverState.FAILED},
    ReceiverState.COMMITTED: {ReceiverState.PREPARED, ReceiverState.FAILED},
    ReceiverState.FAILED: {ReceiverState.PREPARED},
}


class ReceiverProgress:
    """State of one receiver over its sessions."""

    def __init__(self) -> None:
        self.state = ReceiverState.IDLE
        self.version = -1
        """Last committed version."""
        self.session: Session | None = None

    @property
    def serving(self) -> bool:
        return self.state is ReceiverState.COMMITTED

    def require_next(self, session: Session) -> None:
        """Refuse a session while another is open, and one that does not follow the committed version.

        A session from any version may also end at the committed one: every session sends all weights."""
        if self.state in (ReceiverState.PREPARED, ReceiverState.RECEIVING, ReceiverState.VERIFIED):
            raise WeightSyncError(
                f"{session} refused: {self.session} is still open (state {self.state.value})"
            )
        anew = session.from_version is None
        again = session.to_version == self.version >= 0 and (anew or self.state is ReceiverState.FAILED)
        follows = anew or session.from_version == self.version
        if not follows or not (again or session.to_version > self.version):
            raise WeightSyncError(
                f"{session} refused: it must start at this engine's committed version {self.version} and end "
                "at a later one (or at the same one, if the weights were lost)"
            )

    def prepare(self, session: Session) -> None:
        """Open a session that passes `require_next`."""
        self.require_next(session)
        self._move(ReceiverState.PREPARED)
        self.session = session

    def receiving(self) -> None:
        self._move(ReceiverState.RECEIVING)

    def verified(self) -> None:
        self._move(ReceiverState.VERIFIED)

    def commit(self) -> None:
        """Make the session's version the visible one."""
        assert self.session is not None
        self._move(ReceiverState.COMMITTED)
        self.version, self.session = self.session.to_version, None

    def fail(self) -> None:
        """Serve nothing until a later session commits."""
        self._move(ReceiverState.FAILED)
        self.session = None

    def _move(self, state: ReceiverState) -> None:
        if state not in _NEXT[self.state]:
            raise WeightSyncError(
                f"a receiver cannot go from {self.state.value} to {state.value} ({self.session})"
            )
        self.state = state
