"""Which experts the positions of a sample visit: rows that stay where they were made until a trainer rank reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Keep = Callable[[np.ndarray], Any]
"""A block to what stands for it elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouteRows:
    """Consecutive rows of a block."""

    block: Any
    """[R, layers, k] unsigned integers: the experts of R positions in each layer that has experts, by depth. Between
    processes a handle stands for it (launch/workers/route_blocks.py)."""
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a sample: row t is what position t visited when token t + 1 was predicted; its last token has none."""

    pieces: tuple[RouteRows, ...]
    """In the order of positions."""
    missing: int = 0
    """Positions whose experts nobody recorded; their rows mean nothing, and the sample is not trained on."""

    def __len__(self) -> int:
        """The number of rows."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def layers(self, numbers: list[int]) -> np.ndarray:
        """[len(self), len(numbers), k] the rows of these layers, counted among those that have experts."""
        return np.concatenate([p.block[p.start : p.stop, numbers] for p in self.pieces])


def one_after_other(first: Routes | None, more: Routes | None) -> Routes | None:
    """The routes of a response that went on with a further request."""
    if first is None or more is None:
        return first or more
    return Routes(first.pieces + more.pieces, first.missing + more.missing)


def in_one_block(routes: Sequence[Routes | None], keep: Keep) -> tuple[Routes | None, ...]:
    """The same routes, whose rows are one after the other in one block; `keep` gives what stands for it."""
    pieces = [piece for each in routes if each is not None for piece in each.pieces]
    if not pieces:
        return tuple(routes)
    block, ends = keep(np.concatenate([p.block[p.start : p.stop] for p in pieces])), 0
    moved: list[Routes | None] = []
    for each in routes:
        if each is not None:
            ends += len(each)
            each = Routes((RouteRows(block, ends - len(each), ends),), each.missing)
        moved.append(each)
    return tuple(moved)


def expert_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """The narrowest type of expert numbers that vLLM, too, returns them in."""
    return np.uint8 if num_experts <= 256 else np.uint16
