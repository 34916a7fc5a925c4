"""The split of segments over context-parallel ranks: nothing lost, equal causal work."""

import numpy as np
import pytest

from mrl.models.kernels.zigzag import padded, rank_positions, token_multiple


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_token_is_on_one_rank_and_the_work_is_even(cp: int) -> None:
    lengths = padded(np.random.default_rng(0).integers(1, 90, 30), cp)
    positions = np.concatenate([np.arange(length) for length in lengths])
    ranks = [rank_positions(lengths, cp=cp, rank=rank) for rank in range(cp)]
    assert sorted(np.concatenate(ranks).tolist()) == list(range(lengths.sum()))
    assert len({len(index) for index in ranks}) == 1
    assert len({(positions[index] + 1).sum() for index in ranks}) == 1  # keys that its queries see


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (3, 2), (4, 3)])
def test_a_padded_microbatch_splits_over_both_axes(tp: int, cp: int) -> None:
    multiple = token_multiple(tp=tp, cp=cp)
    assert multiple % (2 * cp) == 0 and multiple // cp % tp == 0
