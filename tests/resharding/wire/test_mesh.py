"""Messages of a mesh: those that cannot start count as lost, and NCCL's go in batches."""

import datetime
from typing import Any

import pytest
import torch

from mrl.resharding.wire.mesh import Mesh, MessageLost


def mesh_over(group: Any) -> Mesh:
    mesh = object.__new__(Mesh)
    mesh._group, mesh._timeout = group, datetime.timedelta(seconds=1)
    return mesh


class Gone:
    supports_coalescing = False

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise RuntimeError("Connection closed by peer")

    recv = send


@pytest.mark.parametrize("way", ["sends", "receives"])
def test_a_refused_message_is_told_at_the_wait(way: str) -> None:
    mesh, messages = mesh_over(Gone()), [(1, torch.zeros(1))]
    works = mesh.start(messages if way == "sends" else (), messages if way == "receives" else ())
    with pytest.raises(MessageLost, match="what was sent: Connection closed by peer"):
        mesh.wait(works, "what was sent")


class Recorded:
    """Records calls of ProcessGroupNCCL, which returns one work per batch and none inside it."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def _start_coalescing(self) -> None:
        self.asked.append("start")

    def _end_coalescing(self) -> Any:
        self.asked.append("end")
        return self

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.asked.append(("send", rank, int(tensors[0])))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.asked.append(("recv", rank, int(tensors[0])))

    def wait(self, timeout: datetime.timedelta) -> None:
        self.asked.append("wait")


def test_messages_of_a_batch_are_one_operation_in_the_order_in_which_they_stand() -> None:
    group = Recorded()
    mesh = mesh_over(group)
    sends = [(3, torch.tensor(10)), (3, torch.tensor(11)), (4, torch.tensor(12))]
    works = mesh.start(sends, [(1, torch.tensor(13))])
    messages = [("send", 3, 10), ("send", 3, 11), ("send", 4, 12), ("recv", 1, 13)]
    assert group.asked == ["start", *messages, "end"] and len(works) == 1
    mesh.wait(works, "the batch")
    assert group.asked[-1] == "wait"


def test_an_empty_batch_asks_nothing() -> None:
    group = Recorded()
    assert mesh_over(group).start((), ()) == [] and not group.asked
