"""Receive buckets that other engine ranks of the node may read: one copy of a byte into the node serves all.

The owner counts the windows that arrived, in memory that its readers share. A window's bucket is filled again
only after all engine ranks have loaded that window, so readers need no further lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.shared_memory import OpenedSegment, SharedSegment

_LONGEST_PAUSE_SECONDS = 1e-3
_CHECK_SECONDS = 0.05
"""How often a reader looks whether the session has failed."""


class SharedBuckets:
    """The owner's side: buckets that windows take in turn, and how many windows of a session arrived.

    Two buckets take all their memory at once; of more, each takes only what is written into it."""

    def __init__(self, num_bytes: int, count: int = 2) -> None:
        self._num_bytes, self._count = num_bytes, count
        self._segments = [SharedSegment(count * num_bytes, sparse=count > 2), SharedSegment(16)]

    def bucket(self, window: int) -> torch.Tensor:
        """Return a window's bucket, [num_bytes] uint8."""
        return _bucket(self._segments[0].buffer, self._num_bytes, window % self._count)

    def export(self) -> list[dict[str, Any]]:
        """Return what a reader needs to open them, as plain values."""
        return [segment.export() | {"bucket_bytes": self._num_bytes} for segment in self._segments]

    def begin(self, session_id: str) -> None:
        """Start to count a session's windows."""
        state = self._state
        state[1] = 0
        state[0] = _number(session_id)

    def arrived(self) -> None:
        """Count a window whose bytes are in its bucket."""
        self._state[1] += 1

    @property
    def _state(self) -> torch.Tensor:
        return self._segments[1].buffer.view(torch.int64)

    def close(self) -> None:
        """Free the memory; raise an error if this process still has a view of it."""
        for segment in self._segments:
            segment.close()


class NeighbourBuckets:
    """A reader's side of another engine rank's buckets: mapped once and kept across sessions."""

    def __init__(self, descriptions: Sequence[dict[str, Any]]) -> None:
        self._segments: list[OpenedSegment] = []
        self._num_bytes = descriptions[0]["bucket_bytes"]
        try:
            for description in descriptions:
                self._segments.append(OpenedSegment(description))
        except BaseException:
            self.close()
            raise

    def is_for(self, descriptions: Sequence[dict[str, Any]]) -> bool:
        """Return True if the owner still offers the memory that is open here."""
        return [segment.token for segment in self._segments] == [d.get("token") for d in descriptions]

    def bucket(self, session_id: str, window: int, *, deadline_seconds: float, lost: Lost) -> torch.Tensor:
        """Return the bucket of a window of the session, once its bytes are there.

        Raises:
            WeightSyncError: the session failed, by `lost`, or the deadline passed.
        """
        state, number = self._segments[1].buffer.view(torch.int64), _number(session_id)
        start, pause = time.monotonic(), 1e-5
        checked = start
        while int(state[0]) != number or int(state[1]) <= window:
            now = time.monotonic()
            if now > start + deadline_seconds:
                raise WeightSyncError(
                    f"window {window} did not reach another engine rank of this node within "
                    f"{deadline_seconds} s"
                )
            if now > checked + _CHECK_SECONDS:
                checked = now
                if reason := lost():
                    raise WeightSyncError(reason)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        buffer = self._segments[0].buffer
        return _bucket(buffer, self._num_bytes, window % (buffer.numel() // self._num_bytes))

    def close(self) -> None:
        """Unmap the memory."""
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()


def _bucket(buffer: torch.Tensor, num_bytes: int, place: int) -> torch.Tensor:
    return buffer[place * num_bytes : (place + 1) * num_bytes]


def _number(session_id: str) -> int:
    """Return a number for a session, which differs from that of any other session but by chance."""
    return int(session_id[:15], 16)
