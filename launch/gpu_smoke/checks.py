"""The checks of the GPU smoke test in order; each prints its result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.launch.gpu_smoke.peer import Peer, flat_bytes
from mrl.launch.gpu_smoke.step import batch_of, reference, start_worker, step, write_model
from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.transfer import gather, gather_plan
from mrl.resharding.transfer.lease import describe_device, describe_files
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire.digest import digest
from mrl.resharding.wire.slot_link import SlotLink
from mrl.training.worker import MegatronWorker

LARGEST_DIFFERENCE = 1e-4
"""Of float32 log-probs between devices: sums in another order, no reduced precision."""


class Smoke:
    """Runs the checks, one after the other."""

    def __init__(self, device: str, megabytes: int) -> None:
        self._device, self._payload = device, megabytes << 20
        self._failed = False

    def run(self) -> int:
        torch.backends.cuda.matmul.allow_tf32 = False
        with tempfile.TemporaryDirectory(prefix="mrl-smoke-") as folder:
            write_model(Path(folder))
            expected = reference(folder)
            worker, peer = start_worker(folder), Peer(self._device)
            try:
                self._same_numbers(step(worker), expected)
                self._transfer(peer)
                self._lease(worker, peer)
                self._offload(worker)
            finally:
                peer.close()
                worker.close()
        print("gpu_smoke: " + ("FAILED" if self._failed else f"all checks passed on {self._device}"))
        return int(self._failed)

    def _check(self, passed: bool, text: str) -> None:
        self._failed |= not passed
        print(("ok    " if passed else "FAIL  ") + text, flush=True)

    def _same_numbers(self, ours: dict[str, Any], cpu: dict[str, Any]) -> None:
        for name in ("before", "after"):
            worst = float(np.abs(np.array(ours[name]) - np.array(cpu[name])).max())
            self._check(
                worst < LARGEST_DIFFERENCE,
                f"log-probs {name} the step differ from the CPU's by {worst:.1e} at most",
            )
        moved = float(np.abs(np.array(ours["after"]) - np.array(ours["before"])).max())
        self._check(moved > 10 * LARGEST_DIFFERENCE, f"the step moved log-probs by up to {moved:.1e}")
        close = abs(ours["grad_norm"] / cpu["grad_norm"] - 1)
        self._check(close < 1e-3, f"gradient norm {ours['grad_norm']:.6f}, the CPU's {cpu['grad_norm']:.6f}")

    def _transfer(self, peer: Peer) -> None:
        """Two sessions over the same buffers: the first maps, the second shows what a weight sync costs."""
        sync = SyncSection(bucket_bytes=min(64 << 20, max(1 << 20, self._payload // 8)))
        tensors, plan = payload(self._payload, self._device, sync.bucket_bytes)
        sent = {f"t{i}": digest(flat_bytes(tensor)) for i, tensor in enumerate(tensors)}
        device = torch.device(self._device)
        sender = WeightSender(peer.address, sync, SlotLink(sync.bucket_bytes, device))
        try:
            for version in range(2):
                session = Session.new(version - 1, version, plan.digest)
                peer.ask(
                    "receive", session.session_id, session.from_version, session.to_version, session.digest
                )
                stats = gather.send(
                    [sender], session, plan, tensors, group=None, device=device, deadline_seconds=60.0
                )
                arrived = peer.answer()["digests"]
            self._check(arrived == sent, f"{len(sent)} tensors arrived with the digests they were sent with")
            moved, speed = stats.moved, stats.moved.num_bytes / stats.seconds / 1e9
            size = f"{moved.num_bytes >> 20} MiB in {moved.num_buckets} buckets"
            self._check(speed > 0, f"sender: {size}, {speed:.2f} GB/s with digests")
        finally:
            peer.ask("release")
            peer.answer()
            sender.close()

    def _lease(self, worker: MegatronWorker, peer: Peer) -> None:
        memory = worker.policy.memory
        buffers = [flat_bytes(buffer.param_data) for buffer in memory.buffers]
        memory.lease()
        lent = describe_device(buffers) if self._device == "cuda" else describe_files(memory.export())
        peer.ask("lease", lent)
        same = peer.answer() == [digest(buffer) for buffer in buffers]
        self._check(
            same,
            f"the second process reads the same {sum(b.numel() for b in buffers) >> 10} KiB of leased parameters",
        )
        self._check(raises(WeightSyncError, worker.offload), "off-loading under a live lease is refused")
        peer.ask("unmap")
        peer.answer()
        memory.release()

    def _offload(self, worker: MegatronWorker) -> None:
        def held() -> int:
            return torch.cuda.memory_allocated() if self._device == "cuda" else memory.shared_bytes()

        memory = worker.policy.memory
        before, full, generation = contents(worker), held(), memory.generation
        worker.offload()
        empty = held()
        worker.reload()
        self._check(empty < full / 2, f"off-loading freed {(full - empty) >> 10} of {full >> 10} KiB")
        self._check(memory.generation == generation + 1, "the reloaded memory has a new generation")
        self._check(contents(worker) == before, "the reloaded parameters are the same to the last bit")
        self._check(worker.forward(batch_of()) is not None, "the reloaded worker computes")


def contents(worker: MegatronWorker) -> list[int]:
    """A digest of each parameter buffer."""
    return [digest(flat_bytes(buffer.param_data)) for buffer in worker.policy.memory.buffers]


def payload(
    num_bytes: int, device: str, bucket_bytes: int
) -> tuple[list[torch.Tensor], gather_plan.GatherPlan]:
    """16 tensors on the device, and the plan of one rank that holds them whole."""
    size = num_bytes // 16 // 2
    tensors = [torch.randn(size, dtype=torch.float32, device=device).to(torch.bfloat16) for _ in range(16)]
    checkpoint = [CheckpointTensor(f"t{i}", (size,), "bfloat16") for i in range(16)]
    locals_ = [
        LocalTensor(c.name, 0, c.shape, c.dtype, (Piece(c.name, (0,), c.shape, (0,)),)) for c in checkpoint
    ]
    return tensors, gather_plan.build(checkpoint, [locals_], bucket_bytes)


def raises(kind: type[Exception], action: Callable[[], object]) -> bool:
    try:
        action()
    except kind:
        return True
    return False
