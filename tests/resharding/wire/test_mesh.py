"""A message that cannot even be started is lost like any other: told where it is waited for."""

import datetime
from typing import Any

import pytest
import torch

from mrl.resharding.wire.mesh import Mesh, MessageLost


class Gone:
    """A group whose other members have left."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise RuntimeError("Connection closed by peer")

    recv = send


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_refused_message_is_told_at_the_wait(way: str) -> None:
    mesh = object.__new__(Mesh)
    mesh._group, mesh._timeout = Gone(), datetime.timedelta(seconds=1)
    work = getattr(mesh, way)(torch.zeros(1), 1)
    with pytest.raises(MessageLost, match="what was sent: Connection closed by peer"):
        mesh.wait([work], "what was sent")
