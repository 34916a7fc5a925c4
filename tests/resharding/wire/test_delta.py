"""Changes of a message: nothing is lost, whatever changed, and malformed changes are refused."""

import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.delta import apply_changes, packed_changes, pays


def changed(old: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Return a copy in which a share of the 16-bit words differs."""
    new = old.clone()
    words = new.view(torch.int16)
    chosen = torch.rand(words.numel(), generator=generator) < share
    words[chosen] ^= torch.randint(1, 1 << 15, (int(chosen.sum()),), dtype=torch.int16, generator=generator)
    return new


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.003, 0.1, 0.25])
@pytest.mark.parametrize("size", [512, 4096, 1 << 20])
def test_unpacking_gives_every_bit_of_the_new_message(size: int, share: float) -> None:
    generator = torch.Generator().manual_seed(size)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    new = changed(old, share, generator)
    packed = packed_changes(old, new)
    assert packed is not None and packed.numel() < new.numel()
    apply_changes(old, packed)
    assert torch.equal(old, new)


@pytest.mark.parametrize("places", [[65535], [65536], [0, 65536, 131072], [3 * 65535 + 7, 262143]])
def test_words_far_from_each_other_keep_their_places(places: list[int]) -> None:
    old = torch.zeros(1 << 19, dtype=torch.uint8)
    new = old.clone()
    new.view(torch.int16)[places] = -1
    packed = packed_changes(old, new)
    assert packed is not None
    apply_changes(old, packed)
    assert torch.equal(old, new)


def test_a_message_that_changed_almost_everywhere_is_sent_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    old = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    assert packed_changes(old, changed(old, 0.5, generator)) is None


def test_malformed_changes_are_refused() -> None:
    old = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="malformed changes"):
        apply_changes(old, torch.arange(20, dtype=torch.uint8))
    longer = torch.zeros(4096, dtype=torch.uint8)
    new = longer.clone()
    new[-2:] = 1
    packed = packed_changes(longer, new)
    assert packed is not None
    with pytest.raises(WeightSyncError, match="changes word 2047 of 32"):
        apply_changes(old, packed)


def test_packing_pays_on_slow_links_only() -> None:
    """100 MB become 1 MB in 0.1 s: that saves time on links below 0.99 GB/s."""
    assert pays(100_000_000, 1_000_000, 0.1, 25e6)
    assert pays(100_000_000, 1_000_000, 0.1, 0.98e9)
    assert not pays(100_000_000, 1_000_000, 0.1, 1e9)
