"""Blocks are used again, and never while somebody still holds a tensor on them."""

import torch

from mrl.resharding.wire.copy_pool import CopyPool

CPU = torch.device("cpu")


def data(value: int, size: int = 64) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_block_is_used_again_once_it_is_let_go() -> None:
    pool = CopyPool(64, device=CPU)
    first = pool.copy(data(1)).data_ptr()
    assert pool.copy(data(2, 10)).data_ptr() == first


def test_any_view_keeps_its_bytes() -> None:
    pool = CopyPool(64, device=CPU, limit=2)
    held = [pool.copy(data(value))[8:24].view(torch.int32)[1:] for value in range(5)]
    assert [set(h.view(torch.uint8).tolist()) for h in held] == [{0}, {1}, {2}, {3}, {4}]
    block = held[0].data_ptr() - 12
    del held[0]
    assert pool.copy(data(9)).data_ptr() == block
    assert [set(h.view(torch.uint8).tolist()) for h in held] == [{1}, {2}, {3}, {4}]


def test_what_is_larger_than_a_block_is_copied_all_the_same() -> None:
    pool = CopyPool(64, device=CPU)
    assert pool.copy(data(7, 100)).tolist() == [7] * 100
