"""Collective calls of the dp ranks of one engine (attention data parallelism).

Each rank has its own requests, but every forward pass exchanges tokens between all ranks: a rank without
requests runs an empty batch while any other has some (vLLM's `has_unfinished_requests`, an all-reduce before
each step). All ranks get the same calls in the same order, so that their collectives match.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.errors import PeerLost

_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)
"""Pattern of torch's errors for a collective that lost a rank or timed out; they have no own type."""


@contextlib.contextmanager
def in_lockstep(name: str, *, alone: bool) -> Iterator[None]:
    """Raise PeerLost for another rank's fault (launch/workers/actor_group.py finds it), unless `alone`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if alone or not _is_broken(error):
            raise
        raise PeerLost(
            f"{name} could not continue without the other ranks of its engine: {_cause(error)}"
        ) from error


def all_reduce_max(values: Sequence[int], group: Any) -> list[int]:
    """Return the element-wise maximum of the values [n] over all ranks of a torch group; all must call it."""
    import torch

    tensor = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
    return tensor.tolist()


def _is_broken(error: BaseException) -> bool:
    return bool(_BROKEN.search(str(_cause(error))))


def _cause(error: BaseException) -> BaseException:
    """Return the first error of the chain: for a group outside its world (vLLM's dp group) torch fails to log
    a collective's failure and raises that ValueError instead."""
    while error.__context__ is not None:
        error = error.__context__
    return error
