"""One Megatron rank on the device: a step against the CPU's, a lease that a second process reads, off-load."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.launch.gpu_smoke.peer import Peer, flat_bytes
from mrl.launch.gpu_smoke.report import Report
from mrl.launch.gpu_smoke.tiny_step import Dtype, batch_of, reference, start_worker, step, write_model
from mrl.resharding.wire.digest import digest
from mrl.training.worker import MegatronWorker

LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of log-probs on the device from those of float32 on the CPU: sums in another order, or bfloat16's 8 bits."""
LARGEST_DIFFERENCE_AFTER = 1e-2
"""The same in float32 after Adam's first step, which is the gradient's sign: those near 0 turn by the order of sums."""
LARGEST_GRADIENT_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}
"""Of the gradient's norm, relative."""


def run(device: torch.device, report: Report) -> None:
    """Float32, then bfloat16 on GPUs (what runs use there), each with a worker of its own."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory(prefix="mrl-smoke-") as folder:
        write_model(Path(folder), large=device.type == "cuda")
        expected = reference(folder)
        dtypes: tuple[Dtype, ...] = ("float32", "bfloat16") if device.type == "cuda" else ("float32",)
        for dtype in dtypes:
            worker, peer = start_worker(folder, dtype), Peer(device.type)
            try:
                _same_numbers(step(worker), expected, dtype, report)
                _lease(worker, peer, device, report)
                _offload(worker, peer, device, report)
            finally:
                peer.close()
                worker.close()


def _same_numbers(ours: dict[str, Any], cpu: dict[str, Any], dtype: str, report: Report) -> None:
    bounds = {"before": LARGEST_DIFFERENCE[dtype], "after": LARGEST_DIFFERENCE_AFTER}
    for name in ("before", "after") if dtype == "float32" else ("before",):
        worst = float(np.abs(np.array(ours[name]) - np.array(cpu[name])).max())
        report.check(
            worst < bounds[name], f"{dtype}: log-probs {name} the step, largest difference", f"{worst:.1e}"
        )
    moved = float(np.abs(np.array(ours["after"]) - np.array(ours["before"])).max())
    report.check(
        moved > 10 * LARGEST_DIFFERENCE["float32"], f"{dtype}: the step moved log-probs by", f"{moved:.1e}"
    )
    error = abs(ours["grad_norm"] / cpu["grad_norm"] - 1)
    report.check(
        error < LARGEST_GRADIENT_ERROR[dtype], f"{dtype}: error of the gradient's norm", f"{error:.1e}"
    )


def _lease(worker: MegatronWorker, peer: Peer, device: torch.device, report: Report) -> None:
    memory = worker.policy.memory
    with peer.leased(memory, device) as read:
        size = sum(buffer.param_data.nbytes for buffer in memory.buffers) >> 20
        report.check(
            read == _contents(worker), "the second process reads the leased parameters", f"{size} MiB"
        )
        report.check(_raises(WeightSyncError, worker.offload), "off-loading under a live lease is refused")


def _offload(worker: MegatronWorker, peer: Peer, device: torch.device, report: Report) -> None:
    """Off-load gives the device's memory back, as another process sees it; reload brings the same bits."""
    memory = worker.policy.memory
    before, generation, held = _contents(worker), memory.generation, _held(worker, device)
    visible = _visible(peer, device)
    worker.offload()
    freed, seen = held - _held(worker, device), _visible(peer, device) - visible
    worker.reload()
    least = sum(b.param_data.nbytes + b.grad_data.nbytes for b in memory.buffers)
    report.check(
        freed >= least // 2,
        "off-loading frees parameters and gradients",
        f"{freed >> 20} MiB of {held >> 20}",
    )
    if device.type == "cuda":
        report.check(seen >= 0.9 * freed, "the second process sees that memory free", f"{seen >> 20} MiB")
    report.check(memory.generation == generation + 1, "the reloaded memory has a new generation")
    report.check(_contents(worker) == before, "the reloaded parameters are the same to the last bit")
    report.check(worker.forward(batch_of()) is not None, "the reloaded worker computes")


def _held(worker: MegatronWorker, device: torch.device) -> int:
    """Bytes that this process has of the device, or of shared memory on CPU."""
    return (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else worker.policy.memory.shared_bytes()
    )


def _visible(peer: Peer, device: torch.device) -> int:
    """Bytes that are free on the device, as the second process is told; 0 on CPU."""
    return peer.free_bytes() if device.type == "cuda" else 0


def _contents(worker: MegatronWorker) -> list[int]:
    """A digest of each parameter buffer."""
    return [digest(flat_bytes(buffer.param_data)) for buffer in worker.policy.memory.buffers]


def _raises(kind: type[Exception], action: Callable[[], object]) -> bool:
    try:
        action()
    except kind:
        return True
    return False
