"""The trainer ranks of one weight sync: errors raised on all ranks, and transfers with a deadline."""

from __future__ import annotations

import datetime
import hashlib
import json
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mrl.errors import WeightSyncError

_ERROR_CHARACTERS = 4096

T = TypeVar("T")


class RankGroup:
    """The trainer ranks that run a session together; this process alone if there is no group."""

    def __init__(
        self, group: dist.ProcessGroup | None, deadline_seconds: float, device: torch.device
    ) -> None:
        self._group = group
        self._timeout = datetime.timedelta(seconds=deadline_seconds)
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run the action on every rank; raise an error of any rank on all, with its origin."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self.size > 1:
            failed = torch.tensor([0 if error is None else 1], dtype=torch.int32, device=self.device)
            self._wait(dist.all_reduce(failed, group=self._group, async_op=True))
            if int(failed):
                raise WeightSyncError("the weight sync failed:\n" + self._collect(error)) from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def all_reduce_sum(self, action: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' results, [n] int64; raise an error of any rank on all ranks."""
        result = self.run_on_all(action)
        if self.size == 1:
            return result
        total = result.to(self.device)
        self._wait(dist.all_reduce(total, group=self._group, async_op=True))
        return total.cpu()

    def require_equal(self, facts: Mapping[str, object]) -> None:
        """Raise WeightSyncError on all ranks if a fact differs; the error names it and each rank's value."""
        if self.size == 1:
            return
        values = {name: str(value) for name, value in facts.items()}
        encoded = json.dumps(values, sort_keys=True).encode()
        digests = self._gathered(hashlib.sha256(encoded).digest())
        if len(set(digests)) > 1:
            raise WeightSyncError(
                f"trainer ranks disagree before the first byte: {_differences(self.all_gather(values))}"
            )

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; any value that can be pickled."""
        if self.size == 1:
            return [value]
        data = pickle.dumps(value)
        sizes = [int.from_bytes(size, "little") for size in self._gathered(len(data).to_bytes(8, "little"))]
        return [pickle.loads(item) for item in self._gathered(data.ljust(max(sizes), b"\0"))]

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Start point-to-point messages (rank of the group, flat uint8 data) at once; `wait` ends them."""
        if not sends and not receives:
            return []
        assert self._group is not None
        operations = [
            dist.P2POp(kind, data, dist.get_global_rank(self._group, rank), self._group)
            for kind, listed in ((dist.irecv, receives), (dist.isend, sends))
            for rank, data in listed
        ]
        return dist.batch_isend_irecv(operations)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait until all messages are through, on the device too."""
        for work in works:
            self._wait(work)

    def _collect(self, error: Exception | None) -> str:
        """Return every rank's error text, cut to its last characters."""
        own_text = "" if error is None else "".join(traceback.format_exception(error))[-_ERROR_CHARACTERS:]
        return "\n".join(
            f"trainer rank {rank}: {text}" for rank, text in enumerate(self.all_gather(own_text)) if text
        )

    def _gathered(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes; all ranks pass equally many."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(dist.all_gather(gathered, mine, group=self._group, async_op=True))
        return [t.cpu().numpy().tobytes() for t in gathered]

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)


def _differences(ranks_facts: Sequence[Mapping[str, str]]) -> str:
    """Name the facts that differ between ranks, each with the ranks' values."""
    lines = []
    for name in sorted(set().union(*ranks_facts)):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks_facts):
            values.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            lines.append(f"{name} is " + ", ".join(f"{v} on ranks {ranks}" for v, ranks in values.items()))
    return "; ".join(lines)
