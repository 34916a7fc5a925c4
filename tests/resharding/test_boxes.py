"""Boxes, strided copies and the worked examples of the pure modules."""

import doctest
import importlib
import math
import random

import numpy as np
import pytest
import torch

from mrl.resharding.planner.boxes import cells, contains, intersection, overlapping_boxes
from mrl.resharding.planner.copy_table import BUCKET, CopyList, target_sizes
from mrl.resharding.planner.schedule import slice_of
from mrl.resharding.transfer.copies import run_copies


@pytest.mark.parametrize(
    "module",
    [
        "mrl.models.tensors",
        "mrl.resharding.planner.boxes",
        "mrl.models.layout",
        "mrl.models.rope",
        "mrl.resharding.planner.schedule",
    ],
)
def test_worked_examples(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def random_box(rng: random.Random, dims: int):
    start = tuple(rng.randrange(6) for _ in range(dims))
    return start, tuple(rng.randrange(1, 5) for _ in range(dims))


def painted(box, size: int = 12) -> np.ndarray:
    grid = np.zeros((size,) * len(box[0]), bool)
    grid[tuple(slice(low, low + extent) for low, extent in zip(*box, strict=True))] = True
    return grid


@pytest.mark.parametrize("seed", range(50))
def test_box_arithmetic_equals_painting(seed):
    rng = random.Random(seed)
    dims = rng.choice([1, 2, 3])
    a, b, c = (random_box(rng, dims) for _ in range(3))
    common = intersection(a, b)
    both = painted(a) & painted(b)
    assert (common is None) == (not both.any())
    if common:
        np.testing.assert_array_equal(painted(common), both)
    assert contains(a, b) == (not (painted(b) & ~painted(a)).any())
    total = sum(painted(cell).astype(int) for cell in cells(a, [b, c]))
    np.testing.assert_array_equal(total, painted(a).astype(int))
    for cell in cells(a, [b, c]):
        inside = painted(cell) & painted(b)
        assert not inside.any() or inside.sum() == math.prod(cell[1])
    touching = any((painted(x) & painted(y)).any() for x, y in ((a, b), (a, c), (b, c)))
    assert (overlapping_boxes([a, b, c]) is not None) == touching


@pytest.mark.parametrize("shape", [(7,), (1,), (5, 3), (2, 9), (1, 1), (64, 2)])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_of_a_cell_cover_it_once(shape, parts):
    count = np.zeros(shape, int)
    for part in range(parts):
        if cut := slice_of(shape, part, parts):
            count[tuple(slice(low, low + size) for low, size in zip(*cut, strict=True))] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("seed", range(30))
def test_joined_copies_write_what_single_ones_do(seed):
    """Join random row blocks of one matrix that continue each other in a wider one."""
    rng = random.Random(seed)
    source = torch.arange(8 * 6, dtype=torch.float32)
    plain, joined = torch.zeros(8 * 10), torch.zeros(8 * 10)
    copies, row, count = CopyList(), 0, 0
    while row < 8:
        rows, cols = min(rng.randrange(1, 4), 8 - row), rng.choice([3, 6])
        shift = rng.choice([0, 0, 2])
        copies.add((0, row * 6, 6), (0, row * 10 + shift, 10), rows=rows, cols=cols, wire=1, module=0)
        plain.view(8, 10)[row : row + rows, shift : shift + cols] = source.view(8, 6)[row : row + rows, :cols]
        row, count = row + rows, count + rows * cols
    table = copies.table()
    run_copies(table, [source], [joined])
    assert torch.equal(joined, plain)
    rows, cols = target_sizes(table)
    assert (rows * cols).sum() == count


def test_contiguous_copies_become_one_run_through_the_bucket():
    copies = CopyList()
    for row in range(4):
        copies.add((0, row * 6, 6), (BUCKET, row * 6, 6), rows=1, cols=6, wire=1, module=-1)
    assert len(copies) == 1
    bucket = torch.zeros(24 * 4, dtype=torch.uint8)
    run_copies(copies.table(), [torch.arange(24, dtype=torch.float32)], bucket)
    assert torch.equal(bucket.view(torch.float32), torch.arange(24))
