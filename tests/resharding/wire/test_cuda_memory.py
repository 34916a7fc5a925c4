"""Device memory, tested without a device: how a segment releases its buffer."""

import gc

import torch

from mrl.resharding.wire import cuda_memory
from mrl.resharding.wire.cuda_memory import holders


def test_reference_cycles_are_looked_for_where_something_still_holds_a_buffer(monkeypatch) -> None:
    """A search takes 0.1 s, and a weight sync with a handle per tensor closes thousands."""
    looked: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(True))
    buffer = torch.empty(8, dtype=torch.uint8)
    unused = holders(buffer)
    assert cuda_memory._dropped(buffer, unused).numel() == 0 and not looked
    view = buffer[2:]
    assert cuda_memory._dropped(buffer, unused).numel() == 0 and looked
    del view
