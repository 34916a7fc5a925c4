"""The trainer ranks of one hand-over: actions whose errors all of them raise, and transfers that have a deadline."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mrl.errors import ReshardError

_ERROR_BYTES = 4096

T = TypeVar("T")


class Ranks:
    """A group of None is this process alone."""

    def __init__(
        self, group: dist.ProcessGroup | None, deadline_seconds: float, device: torch.device
    ) -> None:
        self._group = group
        self._timeout = datetime.timedelta(seconds=deadline_seconds)
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def together(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank; an error on any of them is raised on all, with its origin."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self.size > 1:
            failed = torch.tensor([0 if error is None else 1], dtype=torch.int32, device=self.device)
            self._wait(dist.all_reduce(failed, group=self._group, async_op=True))
            if int(failed):
                raise ReshardError("the hand-over failed:\n" + self._collect(error)) from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def broadcast(self, data: torch.Tensor, holder: int) -> None:
        """From a rank of the group, numbered inside it."""
        assert self._group is not None
        source = dist.get_global_rank(self._group, holder)
        self._wait(dist.broadcast(data, source, group=self._group, async_op=True))

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Point to point, all at once: (rank of the group, flat uint8 data) each; returns when all are done."""
        if not sends and not receives:
            return
        assert self._group is not None
        operations = [
            dist.P2POp(kind, data, dist.get_global_rank(self._group, rank), self._group)
            for kind, listed in ((dist.irecv, receives), (dist.isend, sends))
            for rank, data in listed
        ]
        for work in dist.batch_isend_irecv(operations):
            self._wait(work)

    def _collect(self, error: Exception | None) -> str:
        """Every rank's error text, cut to its last bytes."""
        text = "" if error is None else "".join(traceback.format_exception(error))
        own = text.encode()[-_ERROR_BYTES:].ljust(_ERROR_BYTES, b"\0")
        mine = torch.tensor(list(own), dtype=torch.uint8, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(dist.all_gather(every, mine, group=self._group, async_op=True))
        texts = [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in every]
        return "\n".join(f"trainer rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)
