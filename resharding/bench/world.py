"""One rank of the benchmark: its trainer, its slot's receiver process, and sessions in any mode. Collective over all ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.sync import SyncSection
from mrl.errors import ReshardError
from resharding import destinations
from resharding.bench.child import Child
from resharding.bench.peak_memory import PeakMemory
from resharding.bench.slots import StorageSlot
from resharding.bench.trainer import BenchTrainer
from resharding.handover import GatherHandOver, PlannedHandOver
from resharding.layout import Layout
from resharding.session import Session

HandOver = GatherHandOver | PlannedHandOver
CPU = torch.device("cpu")


class Rank:
    """Trainer rank and generation rank of one slot."""

    def __init__(
        self, hf: dict[str, Any], train: Layout, rollout: Layout, rank: int, *, deadline_seconds: float
    ) -> None:
        self.rank = rank
        self.trainer = BenchTrainer(hf, train, rank, device=CPU)
        self.trainer.fill(0)
        self.manifests = destinations.from_layout(hf, rollout)
        self._deadline = deadline_seconds
        self.slot = Child(
            StorageSlot, self.manifests[rank], deadline_seconds, CPU, seconds=2 * deadline_seconds
        )
        (self._address,) = self.slot.call("addresses")
        self._sessions = itertools.count()

    @contextmanager
    def hand_over(self, mode: str, *, bucket_bytes: int, digests: bool) -> Iterator[tuple[HandOver, float]]:
        """(the hand-over as training makes it, seconds to plan it); its buffers are freed at the end."""
        sync = SyncSection(bucket_bytes=bucket_bytes, digests=digests, deadline_seconds=self._deadline)
        started = time.monotonic()
        slots_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.trainer.layout.world_size))
        if mode == "gather":
            hand_over: HandOver = GatherHandOver(self.trainer, sync, self._address)
        else:
            hand_over = PlannedHandOver(
                self.trainer, sync, self._address, self.manifests, slots_per_node=slots_per_node
            )
        yield hand_over, time.monotonic() - started
        self.slot.call("release")
        hand_over.close()

    def run(self, hand_over: HandOver) -> dict[str, float]:
        """One session from the ranks' common start; this rank's seconds and bytes by name."""
        number = next(self._sessions)
        session = Session(f"{number:032x}", number - 1, number, hand_over.digest)
        self.slot.start("receive", session)
        barrier()
        started = time.monotonic()
        stats = hand_over.send(session)
        seconds = time.monotonic() - started
        (received,) = self.slot.result()
        return _phases(seconds, stats, received)

    def peak(self, hand_over: HandOver) -> int:
        """Private bytes that one session needed at most on this slot, in both processes."""
        with PeakMemory([os.getpid(), self.slot.pid]) as peak:
            self.run(hand_over)
        return peak.extra_bytes

    def copy_plainly(self) -> float:
        """Seconds of this slot's receiver to copy as many bytes as it needs, all receivers at once."""
        barrier()
        return self.slot.call("copy_plainly", self.trainer.memory.describe())

    def first_difference(self, hand_over: HandOver, version: int) -> str | None:
        """Fills the trainer with other bytes, poisons the receiver, hands over, compares every byte."""
        self.trainer.fill(version)
        self.slot.call("poison")
        self.run(hand_over)
        return self.slot.call("first_difference", self.trainer.checkpoint, version)

    def close(self) -> None:
        self.slot.close()
        self.trainer.close()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    if not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _phases(seconds: float, stats: dict[str, float], received: dict[str, float]) -> dict[str, float]:
    if set(received) != {"wait", "copy", "load", "process"}:
        raise ReshardError(
            f"the receiver reported other phases than this benchmark knows: {sorted(received)}"
        )
    return {
        "total": seconds,
        "moving": seconds - received["process"],
        "pack": stats["pack_seconds"],
        "exchange": stats["gather_seconds"] - stats["pack_seconds"],
        "sender_wait": stats["sender_wait_seconds"],
        "wait": received["wait"],
        "check": received["copy"],
        "unpack": received["load"],
        "process": received["process"],
        "commit": stats["commit_seconds"],
    }
