"""Boxes, strided copies and the worked examples of the pure modules."""

import doctest
import importlib
import math
import random

import numpy as np
import pytest

from mrl.resharding.planner.boxes import cells, contains, intersection, overlapping_boxes
from mrl.resharding.planner.copy_table import BUCKET, CopyList
from mrl.resharding.planner.schedule import slice_of
from mrl.resharding.transfer.copies import assign, run_copies
from tests.resharding.simulate import num_elements


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
    """Random row blocks, some of them continuing each other, out of one matrix into a wider one."""
    rng = random.Random(seed)
    source = np.arange(8 * 6, dtype=np.float32)
    plain, joined = np.zeros(8 * 10, np.float32), np.zeros(8 * 10, np.float32)
    copies, row, count = CopyList(), 0, 0
    while row < 8:
        rows, cols = min(rng.randrange(1, 4), 8 - row), rng.choice([3, 6])
        shift = rng.choice([0, 0, 2])
        copies.add((0, row * 6, 6), (0, row * 10 + shift, 10), rows=rows, cols=cols, wire=1, module=0)
        plain.reshape(8, 10)[row : row + rows, shift : shift + cols] = source.reshape(8, 6)[
            row : row + rows, :cols
        ]
        row, count = row + rows, count + rows * cols
    table = copies.table()
    run_copies(table, [source], [joined])
    np.testing.assert_array_equal(joined, plain)
    assert num_elements(table) == count


def test_contiguous_copies_become_one_run_through_the_bucket():
    copies = CopyList()
    for row in range(4):
        copies.add((0, row * 6, 6), (BUCKET, row * 6, 6), rows=1, cols=6, wire=1, module=-1)
    assert len(copies) == 1
    bucket = np.zeros(24 * 4, np.uint8)
    run_copies(copies.table(), [np.arange(24, dtype=np.float32)], bucket)
    np.testing.assert_array_equal(bucket.view(np.float32), np.arange(24))


def test_casts_to_bfloat16_bits_round_as_torch_does():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    bits = np.zeros(1000, np.uint16)
    assign(bits, values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bits, expected)
    back = np.zeros(1000, np.float32)
    assign(back, bits)
    np.testing.assert_array_equal(back, torch.from_numpy(values).to(torch.bfloat16).float().numpy())
