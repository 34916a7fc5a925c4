"""What the ranks of one engine with attention data parallel do together, seen from one of them.

Each rank has requests of its own, and every forward pass exchanges tokens between all of them: a rank without requests
runs an empty batch as long as any other has some (vLLM's `has_unfinished_requests`, an all-reduce before each step). All
ranks are given the same calls in the same order, so that they ask equally often.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.errors import PeerLost

_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)
"""What torch's errors say where a collective found another rank gone, or waited in vain; they have no type of their own."""


@contextlib.contextmanager
def in_lockstep(name: str, *, alone: bool) -> Iterator[None]:
    """Around what ranks do together: PeerLost where another one is late or gone, so that the one to blame is looked for
    elsewhere (launch/workers/actor_group.py). `alone`: there is no other."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if alone or not _is_broken(error):
            raise
        raise PeerLost(
            f"{name} could not go on without the other ranks of its engine: {_cause(error)}"
        ) from error


def most(values: Sequence[int], group: Any) -> list[int]:
    """Return the largest of each of the values [n] over all ranks of a group of torch's, all of which ask."""
    import torch

    asked = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX, group=group)
    return asked.tolist()


def _is_broken(error: BaseException) -> bool:
    return bool(_BROKEN.search(str(_cause(error))))


def _cause(error: BaseException) -> BaseException:
    """The first of a chain: torch fails to log a collective's failure where the group is not one of its world (vLLM's between
    dp ranks), and raises that ValueError in the failure's place."""
    while error.__context__ is not None:
        error = error.__context__
    return error
