"""Move routes between processes: blocks stay in their node's object store, where trainer ranks read them.

The driver only forwards references, whose size does not depend on the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.routes import RouteRows, Routes
from mrl.samples import TrainBatch


def share_block(block: np.ndarray) -> Any:
    """Put a block into the object store; it stays while this process lives and a reference exists."""
    import ray

    return ray.put(block)


def read_routes(batch: TrainBatch, *, deadline_seconds: float) -> TrainBatch:
    """Return the batch with route blocks in place of references; blocks of this node are not copied."""
    if batch.routes is None:
        return batch
    import ray

    handles = list(dict.fromkeys(piece.block for routes in batch.routes for piece in routes.pieces))
    blocks = dict(zip(handles, ray.get(handles, timeout=deadline_seconds), strict=True))
    return dataclasses.replace(batch, routes=tuple(_with_blocks(r, blocks) for r in batch.routes))


def of_samples(block: Any, lengths: Sequence[int]) -> list[Routes]:
    """Return the routes of samples of these lengths, whose rows are consecutive in a block."""
    ends = np.cumsum(lengths).tolist()
    return [
        Routes((RouteRows(block, end - length, end - 1),)) for end, length in zip(ends, lengths, strict=True)
    ]


def _with_blocks(routes: Routes, blocks: dict[Any, np.ndarray]) -> Routes:
    pieces = tuple(dataclasses.replace(piece, block=blocks[piece.block]) for piece in routes.pieces)
    return dataclasses.replace(routes, pieces=pieces)
