"""Messages between a slot's sender and receiver: JSON of fixed shapes; anything else is refused.

sender                                   receiver
Open (session, buffers)            ->
                                   <-    Opened (tables wanted? own buckets) | Failed
PlanTables                         ->    (only when wanted)
Neighbours                         ->    (only when it reads their buckets)
WindowFilled (digests) ...         ->
                                   <-    Done (the bytes were taken) | Failed
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
    """Base class: exact fields, exact types."""

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
    """Where the bytes will arrive, from the sender's `Link.describe`."""
    lease: list[dict[str, Any]]
    """The trainers' parameter memory that the receiver reads, in this session only."""
    tables_digest: str
    """Digest of this slot's tables."""
    at_once: bool = False
    """The lease contains all windows; the receiver takes them without a `WindowFilled` each."""
    full: bool
    """The end message carries a proof."""


class Opened(Message):
    kind: Literal["opened"] = "opened"
    wants_tables: bool
    buckets: list[dict[str, Any]] = []
    """The receive buckets, for other engine ranks of the node; empty if they cannot be shared."""
    held_version: int | None = None
    """Version whose messages the receiver still has, by the same tables; None if it needs whole ones."""


class PlanTables(Message):
    kind: Literal["tables"] = "tables"
    tables: dict[str, Any]
    """`Tables.encode`."""


class Neighbours(Message):
    kind: Literal["neighbours"] = "neighbours"
    buckets: list[list[dict[str, Any]]]
    """`Opened.buckets` of the tables' neighbours, in their order."""


class BucketMessage(BaseModel):
    """Bytes of a receive bucket that one trainer rank sends."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rank: Size
    """Sender's rank among the trainers."""
    offset: Size
    num_bytes: Size
    digest: int | None = None
    """The sender's digest, if the bytes are in the bucket already; None: the digest follows the bytes."""


class WindowFilled(Message):
    """A window's receive bucket is filled; the window's copies from leased memory may run too."""

    kind: Literal["window"] = "window"
    index: Size
    """Windows take the receive buckets in turn."""
    messages: list[BucketMessage] | None = None
    """Messages that make up the bucket: with digests if they are in the slot's memory, else still to come
    from the trainer ranks. None: this rank alone filled it."""


class Done(Message):
    kind: Literal["done"] = "done"
    index: Size


class SessionEnd(Message):
    kind: Literal["end"] = "end"
    num_windows: Size
    proof: str | None = None
    """`TrainerProof.exchange_digests`: parameter digests in the cells' order; None without a proof."""


class Verified(Message):
    kind: Literal["verified"] = "verified"
    seconds: dict[str, float]
    """The receiver's seconds by phase: wait, copy, load, process."""


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
    """A receiver's sign of life to a sender on another machine; needs no answer."""

    kind: Literal["waiting"] = "waiting"


AnyMessage = Annotated[
    Open
    | Opened
    | PlanTables
    | Neighbours
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
    """Return the message in `data`; raise WeightSyncError for anything that is not exactly one."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise WeightSyncError(f"refused a malformed weight sync message: {error}") from error
