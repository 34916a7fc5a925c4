"""Faults injected into a session, at either end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.wire import mesh_link, slot_link
from mrl.resharding.wire.bucket_messages import require_digest
from mrl.resharding.wire.messages import Message


def after(receiver: Receiver, point: str, action: Callable[[], None]) -> None:
    """Act after a receiver "accepted" its sender, was "told" the tables, or "verified" everything."""
    owner = receiver.progress if point == "verified" else receiver
    name = {"accepted": "_accept", "told": "_tables", "verified": "verified"}[point]
    step = getattr(owner, name)

    def reached(*arguments: object) -> object:
        result = step(*arguments)
        setattr(owner, name, step)
        action()
        return result

    setattr(owner, name, reached)


def change_messages(sender: WeightSender, change: Callable[[Message], Message]) -> None:
    """Replace each message by what `change` returns for it."""
    post = sender._post
    sender._post = lambda message: post(change(message))  # type: ignore[method-assign]


def flip_a_bit(monkeypatch: pytest.MonkeyPatch, *, message: int) -> None:
    """Change one message's bytes in the receiver's bucket before they are checked."""
    ahead = [message]

    def flipped(data: torch.Tensor, sent: int, rank: int) -> None:
        ahead[0] -= 1
        if not ahead[0]:
            data[1] ^= 16
        require_digest(data, sent, rank)

    for module in (slot_link, mesh_link):
        monkeypatch.setattr(module, "require_digest", flipped)
