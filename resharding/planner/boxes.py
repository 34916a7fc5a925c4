"""Arithmetic on boxes of integers: intersection, grids of cells, disjointness. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, shape)."""


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common box, or None if there is none.

    >>> intersection(((0, 0), (4, 4)), ((2, 1), (4, 2)))
    ((2, 1), (2, 2))
    """
    start, shape = [], []
    for a0, an, b0, bn in zip(a[0], a[1], b[0], b[1], strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return tuple(start), tuple(shape)


def full_shape(boxes: Iterable[Box]) -> tuple[int, ...]:
    """Return the ends of a tensor's boxes in each dimension.

    >>> full_shape([((0, 0), (2, 4)), ((2, 0), (1, 3))])
    (3, 4)
    """
    ends = [[at + size for at, size in zip(*box, strict=True)] for box in boxes]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    """Return True if `outer` contains every element of `inner`."""
    (a, an), (b, bn) = outer, inner
    return all(a[d] <= b[d] and b[d] + bn[d] <= a[d] + an[d] for d in range(len(a)))


def cells(box: Box, cutters: Iterable[Box]) -> Iterator[Box]:
    """Cut the box into a grid at every face of the cutters; yield its cells in row-major order.

    >>> list(cells(((0,), (4,)), [((2,), (9,))]))
    [((0,), (2,)), ((2,), (2,))]
    """
    start, shape = box
    edges = [{low, low + size} for low, size in zip(start, shape, strict=True)]
    for cutter_start, cutter_shape in cutters:
        for dim, (low, size) in enumerate(zip(cutter_start, cutter_shape, strict=True)):
            for edge in (low, low + size):
                if start[dim] < edge < start[dim] + shape[dim]:
                    edges[dim].add(edge)
    spans = [list(itertools.pairwise(sorted(dim))) for dim in edges]
    for cell in itertools.product(*spans):
        yield tuple(low for low, _ in cell), tuple(high - low for low, high in cell)


def overlapping_boxes(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None.

    >>> overlapping_boxes([((0, 0), (2, 2)), ((0, 2), (2, 2))]) is None
    True
    """
    if len(boxes) < 2:
        return None
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        first = box[0][0] if box[0] else 0
        open_boxes = [other for other in open_boxes if other[0] and other[0][0] + other[1][0] > first]
        for other in open_boxes:
            if intersection(other, box):
                return other, box
        open_boxes.append(box)
    return None
