"""Tensors of somebody else's trainer, moved by a plan between real ranks: what is needed is there to the last bit, or all raise."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

import mrl
from tests.ranks import run_ranks

WHOLE = {"matrix": (12, 10), "vector": (9,), "experts": (6, 4, 5), "scalar": ()}
Cuts = dict[str, list[tuple[slice, ...] | None]]


def whole(name: str, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return {n: torch.randn(shape) for n, shape in WHOLE.items()}[name]


def cuts(seed: int, size: int) -> Cuts:
    """For each tensor the part of each rank, one dimension cut at random places; sometimes all of it on every rank."""
    rng, made = random.Random(seed), Cuts()
    for name, shape in WHOLE.items():
        if not shape or rng.random() < 0.3:
            made[name] = [tuple(slice(0, n) for n in shape)] * size
            continue
        dim = rng.randrange(len(shape)) if len(shape) < 3 else 0
        edges = [0, *sorted(rng.randrange(shape[dim] + 1) for _ in range(size - 1)), shape[dim]]
        made[name] = [
            tuple(slice(low, high) if d == dim else slice(0, n) for d, n in enumerate(shape)) if low < high else None
            for low, high in itertools.pairwise(edges)
        ]  # fmt: skip
    return made


def part(made: Cuts, name: str, rank: int, step: int) -> torch.Tensor | None:
    box = made[name][rank]
    return None if box is None else whole(name, step)[box].contiguous()


def boxes(made: Cuts, rank: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    found = {}
    for name in WHOLE:
        values, box = part(made, name, rank, 0), made[name][rank]
        if values is not None and box is not None:
            found[name] = (torch.full_like(values, torch.nan, dtype=dtype), tuple(s.start for s in box))
    return found


def rank_main(rank: int, size: int, port: int) -> list[str]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    assert max(synced(rank, size, seed) for seed in range(12)) > 3
    errors = [refused(rank, case) for case in ("gap", "shape", "strided", "start", "columns", "scales")]
    dist.destroy_process_group()
    return errors


def synced(rank: int, size: int, seed: int) -> int:
    """Two updates through one plan, in windows of 64 bytes, into another cut of another dtype; how many windows."""
    sources, targets = cuts(seed, size), cuts(100 + seed, size)
    held, needed = boxes(sources, rank, torch.float32), boxes(targets, rank, torch.bfloat16)
    sync = mrl.TensorSync(held, needed, bucket_bytes=64)
    summary = sync.plan.summary()
    crossing = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    assert crossing == summary["lower_bound_cross_slot_bytes"]
    for step in (1, 2):
        for name, (tensor, _) in held.items():
            tensor.copy_(part(sources, name, rank, step))  # type: ignore[arg-type]
        sync.run()
        for name, (tensor, _) in needed.items():
            expected = part(targets, name, rank, step)
            assert expected is not None and torch.equal(tensor, expected.to(torch.bfloat16)), (seed, name)
    return len(sync.plan.windows)


def refused(rank: int, case: str) -> str:
    """What every rank is told where one of them (or both together) ask for what cannot be."""
    here = rank == 0
    rows, all_rows = torch.zeros(2, 6), torch.zeros(6, 6)
    held = {"w": (rows, (2 * rank, 0))}
    needed = {"w": (all_rows, (0, 0))}
    if case == "gap" and rank == 1:
        held = {}
    elif case == "shape":
        needed = {"w": (torch.zeros(6, 7), (0, 0))}
    elif case == "strided" and here:
        held = {"w": (torch.zeros(6, 2).T, (0, 0))}
    elif case == "start" and here:
        held = {"w": (rows, (0,))}
    elif case == "columns":
        held = {"w": (torch.zeros(2, 2, 2), (0, 2 * rank, 0))}
        needed = {"w": (torch.zeros(2, 6, 2), (0, 0, 0))}
    elif case == "scales":
        held, needed = {"w_scale_inv": held["w"]}, {"w_scale_inv": needed["w"]}
    with pytest.raises(mrl.WeightSyncError) as error:
        mrl.TensorSync(held, needed)
    return str(error.value)


@pytest.mark.integration
def test_any_cut_becomes_any_other_or_all_ranks_are_told_why() -> None:
    said = run_ranks(rank_main, 3, seconds=240)
    gap, shape, strided, start, columns, scales = zip(*said, strict=True)
    assert all("held by no trainer rank: w" in text for text in gap)
    assert all("the trainer has (6, 6), the engines (6, 7)" in text for text in shape)
    assert all("has to be contiguous" in text for text in strided)
    assert all("begins at (0,), but has 2 dimensions" in text for text in start)
    assert all("of 3 dimensions only the first may be cut" in text for text in columns)
    assert all("are kept for the scales" in text for text in scales)
