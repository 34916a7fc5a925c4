"""The split of segments over context-parallel ranks: nothing lost, equal causal work."""

import numpy as np
import pytest
import torch

from mrl.models.kernels.buckets import segment_buckets
from mrl.models.kernels.zigzag import kept_positions, padded, token_multiple


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_token_is_on_one_rank_and_the_work_is_even(cp: int) -> None:
    lengths = padded(np.random.default_rng(0).integers(1, 90, 30), cp)
    positions = np.concatenate([np.arange(length) for length in lengths])
    ranks = [kept_positions(lengths, cp=cp, rank=rank) for rank in range(cp)]
    assert sorted(np.concatenate(ranks).tolist()) == list(range(lengths.sum()))
    assert len({len(own) for own in ranks}) == 1
    assert len({(positions[own] + 1).sum() for own in ranks}) == 1  # keys that its queries see


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (3, 2), (4, 3)])
def test_a_padded_microbatch_splits_over_both_axes(tp: int, cp: int) -> None:
    multiple = token_multiple(tp=tp, cp=cp)
    assert multiple % (2 * cp) == 0 and multiple // cp % tp == 0


@pytest.mark.parametrize("cp", [2, 3])
def test_queries_and_gathered_keys_of_a_bucket_are_of_the_same_segments(cp: int) -> None:
    """Keys hold position j of a segment in slot j; each query's mask opens exactly the positions up to its own."""
    lengths = padded(np.random.default_rng(1).integers(1, 90, 20), cp)
    ids = np.repeat(np.arange(len(lengths)), lengths) * 1000 + np.concatenate([np.arange(n) for n in lengths])
    gathered = torch.from_numpy(
        np.concatenate([ids[kept_positions(lengths, cp=cp, rank=r)] for r in range(cp)])
    )
    for rank in range(cp):
        packed = segment_buckets(lengths, dtype=torch.float32, device=torch.device("cpu"), cp=cp, rank=rank)
        own = torch.from_numpy(ids[kept_positions(lengths, cp=cp, rank=rank)])
        keys = gathered[packed.keys.slot_tokens].split([a * b for a, b in packed.keys.shapes])
        queries = own[packed.queries.slot_tokens].split([a * b for a, b in packed.queries.shapes])
        seen = 0
        for q, k, mask, q_shape, k_shape in zip(
            queries, keys, packed.masks, packed.queries.shapes, packed.keys.shapes, strict=True
        ):
            for row, (asked, held) in enumerate(zip(q.view(q_shape), k.view(k_shape), strict=True)):
                for slot, query in enumerate(asked.tolist()):
                    if query // 1000 != held[0] // 1000:
                        continue  # padding of the queries
                    open_keys = held[mask[row, 0, slot] == 0].tolist()
                    assert open_keys == list(range(query // 1000 * 1000, query + 1))
                    seen += 1
        assert seen >= len(own)
