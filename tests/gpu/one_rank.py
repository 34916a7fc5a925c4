"""The lane of one trainer rank, whose messages go to the only receiver."""

from __future__ import annotations

import torch

from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.messages import BucketMessage


class OneRankLane:
    """Copies the trainer rank's messages into the bucket shared with the receiver (`lanes.Lane`)."""

    def __init__(self, part: SlotPart, device: torch.device) -> None:
        self._bucket = torch.empty(part.send_bucket_bytes, dtype=torch.uint8, device=device)
        self._arrived: list[BucketMessage] = []

    def bucket(self, turn: int) -> torch.Tensor:
        return self._bucket

    def prepare(self, turn: int, window: WindowPart) -> None:
        """Do nothing: packed bytes go as they are."""

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        assert received is not None
        self._arrived = []
        for message in window.sends:
            data = self._bucket[message.offset : message.offset + message.num_bytes]
            sent = digest_bytes(data)
            received[: message.num_bytes].copy_(data)
            self._arrived.append(BucketMessage(rank=0, offset=0, num_bytes=message.num_bytes, digest=sent))

    def finish(self, turn: int) -> list[BucketMessage] | None:
        return self._arrived

    def drain(self) -> None:
        """Do nothing: every window was finished."""
