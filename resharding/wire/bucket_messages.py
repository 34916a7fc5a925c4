"""Messages of many senders that make up one bucket: their places in it, and the check of their digests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.messages import BucketMessage

_SIGN = 1 << 63
Message = tuple[int, torch.Tensor]
"""(rank of the other end, data)."""


def trailer(data: torch.Tensor) -> torch.Tensor:
    """Return the digest of a message as [1] int64 on its device, to be sent after it."""
    value = digest_bytes(data)
    return torch.tensor([value - 2 * _SIGN if value >= _SIGN else value], device=data.device)


def with_digests(messages: Iterable[Message]) -> list[Message]:
    """Return messages to send, each followed by the digest of its data."""
    return [part for rank, data in messages for part in ((rank, data), (rank, trailer(data)))]


def with_trailers(
    messages: Sequence[Message], device: torch.device
) -> tuple[list[Message], list[torch.Tensor]]:
    """Return messages to receive, each followed by room for its digest; and the rooms, for `digest_in`."""
    trailers = [torch.empty(1, dtype=torch.int64, device=device) for _ in messages]
    pairs = zip(messages, trailers, strict=True)
    return [part for message, room in pairs for part in (message, (message[0], room))], trailers


def digest_in(trailer: torch.Tensor) -> int:
    """Return the digest in a `trailer`."""
    return int(trailer) % (2 * _SIGN)


def split(bucket: torch.Tensor, parcels: Sequence[BucketMessage]) -> list[tuple[int, torch.Tensor]]:
    """Return each parcel's (sender's rank, its bytes).

    Raises:
        WeightSyncError: the parcels have gaps or overlap, or do not fill the bucket.
    """
    pieces, end = [], 0
    for parcel in parcels:
        if parcel.offset != end:
            raise WeightSyncError(f"{parcel} should begin at byte {end} of its bucket")
        end += parcel.num_bytes
        pieces.append((parcel.rank, bucket[parcel.offset : end]))
    if end != bucket.numel():
        raise WeightSyncError(f"the parcels have {end} bytes, but the bucket has {bucket.numel()}")
    return pieces


def require_digest(data: torch.Tensor, sent: int, rank: int) -> None:
    """Raise WeightSyncError unless `data` has the digest that trainer rank `rank` sent."""
    if digest_bytes(data) != sent:
        raise WeightSyncError(
            f"the {data.numel()} bytes received from trainer rank {rank} do not match the digest it sent"
        )
