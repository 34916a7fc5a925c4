"""The places in a session where a fault can be put in on purpose, at either end."""

from __future__ import annotations

import torch

from mrl.resharding.wire.messages import Message


class Faults:
    """No fault at all; a test overrides what it needs. `WeightSender.faults` and `Receiver.faults` take one."""

    def sends(self, message: Message) -> Message:
        """The message that is sent in place of this one of the sender's."""
        return message

    def arrived(self, data: torch.Tensor) -> None:
        """`data`: bytes in the receiver's bucket, before anything checks them."""

    def reached(self, point: str) -> None:
        """The receiver accepted its sender ("accepted"), knows what will come ("told"), verified everything
        ("verified")."""
