"""Routes: the experts that a sample's positions visit; rows stay in place until a trainer rank reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Keep = Callable[[np.ndarray], Any]
"""Function from a block to its handle elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouteRows:
    """Consecutive rows of a block."""

    block: Any
    """[R, layers, k] unsigned integers: the experts of R positions in each layer with experts, by depth.
    Between processes, a handle replaces it (launch/workers/route_blocks.py)."""
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """Routes of a sample: row t has position t's experts when it predicts token t + 1; none for the last."""

    pieces: tuple[RouteRows, ...]
    """Pieces in the order of positions."""
    missing: int = 0
    """Positions whose experts were not recorded; their rows are invalid, and the sample is not trained on."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def layers(self, numbers: list[int]) -> np.ndarray:
        """Return the rows [len(self), len(numbers), k] of these layers, counted among those with experts."""
        return np.concatenate([p.block[p.start : p.stop, numbers] for p in self.pieces])


def one_after_other(first: Routes | None, second: Routes | None) -> Routes | None:
    """Join the routes of a response with those of its continuation."""
    if first is None or second is None:
        return first or second
    return Routes(first.pieces + second.pieces, first.missing + second.missing)


def in_one_block(routes: Sequence[Routes | None], keep: Keep) -> tuple[Routes | None, ...]:
    """Return the same routes with their rows in one block; `keep` returns the block's handle."""
    pieces = [
        piece for sample_routes in routes if sample_routes is not None for piece in sample_routes.pieces
    ]
    if not pieces:
        return tuple(routes)
    block, ends = keep(np.concatenate([p.block[p.start : p.stop] for p in pieces])), 0
    moved: list[Routes | None] = []
    for sample_routes in routes:
        if sample_routes is not None:
            ends += len(sample_routes)
            sample_routes = Routes(
                (RouteRows(block, ends - len(sample_routes), ends),), sample_routes.missing
            )
        moved.append(sample_routes)
    return tuple(moved)


def expert_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """Return the narrowest type for expert numbers, as in vLLM."""
    return np.uint8 if num_experts <= 256 else np.uint16
