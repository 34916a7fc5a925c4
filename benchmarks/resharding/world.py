"""One rank of the benchmark: its trainer, its slot's receiver process, and sessions in any mode."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.resharding.child import Child
from benchmarks.resharding.engine_slots import EngineKind, EngineSlots
from benchmarks.resharding.peak_memory import PeakMemory, family
from benchmarks.resharding.slots import StorageSlot
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.session import Session

Verify = Literal["wire", "full"]
CPU = torch.device("cpu")


class Rank:
    """Trainer rank and engine rank of one slot."""

    def __init__(
        self,
        hf: dict[str, Any],
        train: Layout,
        manifests: list[RankManifest],
        rank: int,
        *,
        engine: EngineKind | None,
        deadline_seconds: float,
        slots_per_node: int,
    ) -> None:
        """Start the rank.

        Args:
            manifests: of every engine rank.
            engine: settings of real vLLM engines; None: storages in their layout.
            slots_per_node: slots that share a node's memory."""
        self.rank = rank
        self.trainer = BenchTrainer(hf, train, rank, device=CPU)
        self.trainer.fill(0)
        self.manifests = manifests
        self._deadline, self._engine = deadline_seconds, engine
        self._topology = Topology.shared(train.world_size, slots_per_node=slots_per_node)
        self.right = "same log-probs after every mode" if engine else "every byte as expected"
        """What `difference` has proved if it returns None."""
        self._slots_per_child = engine.tp if engine else 1
        self._copier = Child(
            StorageSlot, self.manifests[rank], deadline_seconds, CPU, seconds=2 * deadline_seconds
        )
        self._slot = self._copier
        if engine:
            self._slot = self._engine_of_slot(hf, engine)
            traced = gathered(self._ask("manifests", self.trainer.checkpoint))
            self.manifests = [dataclasses.replace(m, rank=r) for r, m in enumerate(traced)]
        self._addresses = gathered(self._ask("addresses"))
        self._sessions = itertools.count()
        self._answers: dict[int, Any] = {}
        self._full = False

    def _engine_of_slot(self, hf: dict[str, Any], kind: EngineKind) -> Child | None:
        """Return the engine on the first of its `tp` slots, None on the others."""
        if self.rank % kind.tp:
            return None
        index = self.rank // kind.tp
        return Child(EngineSlots, hf, kind, index, self._deadline, seconds=2 * self._deadline)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call this slot's engine rank and return its result."""
        if self._slot is not None:
            self._slot.start(method, *arguments)
        return self._result()

    def _result(self) -> Any:
        answers = [] if self._slot is None else self._slot.result()
        return [answer for several in gathered(answers) for answer in several][self.rank]

    @contextmanager
    def weight_sync(
        self, mode: str, *, bucket_bytes: int, verify: Verify
    ) -> Iterator[tuple[PlannedSync, float]]:
        """Yield (the weight sync as in training, seconds to plan it); free its buffers at the end.

        `mode`: planned; or whole: every engine rank gets every complete tensor and cuts it itself."""
        sync = SyncSection(bucket_bytes=bucket_bytes, verify=verify, deadline_seconds=self._deadline)
        self._full = verify == "full"
        started = time.monotonic()
        manifests = self.manifests
        if mode == "whole":
            names = [tensor.name for tensor in self.trainer.checkpoint]
            manifests = [RankManifest.of(m.rank, (), names) for m in manifests]
        weight_sync = PlannedSync(self.trainer, sync, self._addresses, manifests, topology=self._topology)
        yield weight_sync, time.monotonic() - started
        if self._slot is not None:
            self._slot.call("release")
        barrier()  # an engine's other slots are released by its first
        weight_sync.close()

    def run(self, weight_sync: PlannedSync) -> dict[str, float]:
        """Run one session from the ranks' common start; return this rank's seconds by phase."""
        number = next(self._sessions)
        session = Session(f"{number:032x}", number - 1, number, weight_sync.digest, self._full)
        if self._slot is not None:
            self._slot.start("receive", session)
        barrier()
        started, busy = time.monotonic(), self._processor_seconds()
        stats = weight_sync.send(session)
        seconds = time.monotonic() - started
        phases = _phases(seconds, stats, self._result())
        return phases | {"processor": self._processor_seconds() - busy}

    def _processor_seconds(self) -> float:
        """Return CPU seconds of this slot's main threads: a session's cost, however busy the machine is."""
        pids = [os.getpid(), *([] if self._slot is None else family(self._slot.pid))]
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9

    def peak(self, weight_sync: PlannedSync) -> int:
        """Return the peak private bytes of one session, of the trainer and a generation side here."""
        slot = [] if self._slot is None else family(self._slot.pid)
        with PeakMemory([os.getpid()]) as trainer, PeakMemory(slot) as generation:
            self.run(weight_sync)
        return trainer.extra_bytes + generation.extra_bytes // self._slots_per_child

    def copy_plainly(self) -> float:
        """Return this slot's seconds to copy as many bytes as it needs, all receivers at once."""
        barrier()
        return self._copier.call("copy_plainly", self.trainer.memory.describe())

    def difference(self, weight_sync: PlannedSync, version: int) -> str | None:
        """Sync other bytes and return a difference, or None.

        Poisoned storages are compared byte by byte, engines by log-probs, bit-equal in all modes."""
        self.trainer.fill(version)
        if not self._engine:
            self._ask("poison")
        self.run(weight_sync)
        if not self._engine:
            return self._ask("differences", self.trainer.checkpoint, version)
        answers = self._ask("answers")
        known = self._answers.setdefault(version, answers)
        return None if answers == known else f"log-probs {answers} differ from the first mode's {known}"

    def close(self) -> None:
        for child in {id(c): c for c in (self._slot, self._copier) if c is not None}.values():
            child.close()
        self.trainer.close()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _phases(seconds: float, stats: dict[str, float], received: dict[str, float]) -> dict[str, float]:
    if set(received) != {"wait", "copy", "load", "process"}:
        raise WeightSyncError(
            f"the receiver reported phases that this benchmark does not know: {sorted(received)}"
        )
    return {
        "total": seconds,
        "moving": seconds - received["process"],
        "pack": stats["pack_seconds"],
        "exchange": stats["move_seconds"] - stats["pack_seconds"],
        "sender_wait": stats["sender_wait_seconds"],
        "wait": received["wait"],
        "check": received["copy"],
        "unpack": received["load"],
        "process": received["process"],
        "commit": stats["commit_seconds"],
        "prove": stats["prove_seconds"],
    }
