"""The messages between a slot's sender and receiver: JSON with a fixed shape, refused when anything else
arrives.

sender                                   receiver
Open (session, buffers)            ->
                                   <-    Opened (tables wanted?) | Failed
PlanTables                         ->    (only when wanted)
WindowFilled (buffer, digests) ... ->
                                   <-    Done (the buffer is free again) | Failed
SessionEnd (totals, proof)         ->
                                   <-    Verified (what was loaded) | Failed
Commit | Abort                     ->
                                   <-    Committed | Failed
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mrl.errors import WeightSyncError

Size = Annotated[int, Field(ge=0)]


class Message(BaseModel):
    """Base: exact fields, exact types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    session_id: str


class Open(Message):
    kind: Literal["open"] = "open"
    from_version: int | None
    to_version: int
    digest: str
    pid: Size
    start_ticks: Size
    buffers: list[dict[str, Any]]
    """Where the bytes will come: what the sender's `Link.describe` says."""
    lease: list[dict[str, Any]]
    """The trainers' parameter memory that the receiver reads, for this session only."""
    tables_digest: str
    """The digest of this slot's tables."""
    at_once: bool = False
    """All windows lie in the lease, and are taken without a `WindowFilled` for each."""
    full: bool
    """The end carries a proof."""


class Opened(Message):
    kind: Literal["opened"] = "opened"
    wants_tables: bool


class PlanTables(Message):
    kind: Literal["tables"] = "tables"
    tables: dict[str, Any]
    """`Tables.encode`."""


class Parcel(BaseModel):
    """Bytes of a receive bucket that one trainer rank sends."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rank: Size
    """The sender's rank among the trainers."""
    offset: Size
    num_bytes: Size
    digest: int | None = None
    """As its sender computed it, where the bytes lie in the bucket already; None: it comes after them."""


class WindowFilled(Message):
    """The receive bucket of one window of the plan is filled; the window's copies from leased memory may run
    too."""

    kind: Literal["window"] = "window"
    index: Size
    buffer: Literal[0, 1]
    parcels: list[Parcel] | None = None
    """What the bucket is made of, with digests where it lies in the slot's memory, else still to come from each trainer
    rank. None: this rank alone filled it."""


class Done(Message):
    kind: Literal["done"] = "done"
    index: Size


class SessionEnd(Message):
    kind: Literal["end"] = "end"
    num_windows: Size
    proof: str | None = None
    """`TrainerProof.said`: digests of the trainer's own parameters, in the order of the cells; None in a
    session without."""


class Verified(Message):
    kind: Literal["verified"] = "verified"
    seconds: dict[str, float]
    """wait, copy, load, process: where the receiver's time went."""


class Commit(Message):
    kind: Literal["commit"] = "commit"


class Abort(Message):
    kind: Literal["abort"] = "abort"
    error: str


class Committed(Message):
    kind: Literal["committed"] = "committed"


class Failed(Message):
    kind: Literal["failed"] = "failed"
    error: str


class StillWaiting(Message):
    """A receiver's sign of life to a sender elsewhere; it is not answered."""

    kind: Literal["waiting"] = "waiting"


AnyMessage = Annotated[
    Open
    | Opened
    | PlanTables
    | WindowFilled
    | Done
    | SessionEnd
    | Verified
    | Commit
    | Abort
    | Committed
    | Failed
    | StillWaiting,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def encode_message(message: Message) -> bytes:
    return message.model_dump_json().encode()


def decode_message(data: bytes) -> AnyMessage:
    """Raises WeightSyncError for anything that is not exactly one of the messages above."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise WeightSyncError(f"a malformed weight sync message was refused: {error}") from error
