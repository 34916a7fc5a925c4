"""Which experts the positions of a sample visit: rows that stay where they were made until a trainer rank reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a block."""

    block: Any
    """[R, layers, k] unsigned integers: the experts of R positions in each layer that has experts, by depth. Between
    processes a handle stands for it (launch/workers/route_blocks.py)."""
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a sample: row t is what position t visited when token t + 1 was predicted; its last token has none."""

    pieces: tuple[Rows, ...]
    """In the order of positions."""
    missing: int = 0
    """Positions whose experts nobody recorded; their rows mean nothing, and the sample is not trained on."""

    def __len__(self) -> int:
        """The number of rows."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def layers(self, numbers: list[int]) -> np.ndarray:
        """[len(self), len(numbers), k] the rows of these layers, counted among those that have experts."""
        return np.concatenate([p.block[p.start : p.stop, numbers] for p in self.pieces])

    def followed_by(self, more: Routes) -> Routes:
        """The routes of a response that went on with a further request."""
        return Routes(self.pieces + more.pieces, self.missing + more.missing)


def kind_of(num_experts: int) -> type[np.unsignedinteger]:
    """The narrowest type of expert numbers that vLLM, too, returns them in."""
    return np.uint8 if num_experts <= 256 else np.uint16
