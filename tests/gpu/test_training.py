"""One Megatron rank on the device: a step against the CPU's, a lease to a second process, off-loading."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.digest import digest_bytes
from mrl.training.worker import MegatronWorker
from tests.gpu.figures import check, show
from tests.gpu.peer import Peer, flat_bytes
from tests.gpu.tiny_step import Dtype, make_batch, reference, start_tiny_worker, train_step, write_model

LARGEST_DIFFERENCE = 1e-4
"""Of float32's log-probs on the device from those on the CPU: sums in another order."""
MEDIAN_DIFFERENCE = 2e-2
"""Bound of bfloat16 against float32 on the CPU, where it is 8e-3. The maximum says nothing: a token that
bfloat16 sends to another expert is off by 0.57 on the CPU too."""
LARGEST_DIFFERENCE_AFTER = 1e-2
"""The same in float32 after Adam's first step, the gradient's sign: the order of sums flips some near 0."""
LARGEST_GRADIENT_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}
"""Of the gradient's norm, relative."""


@pytest.mark.integration
def test_a_step_and_what_is_lent_and_off_loaded(device: torch.device, tmp_path: Path) -> None:
    """Run float32, then bfloat16 on GPUs, in a subprocess: in pytest's own, it changed later tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_train, device, tmp_path).result(timeout=280)


def _train(device: torch.device, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = str(tmp_path / "model")
    write_model(Path(folder), large=device.type == "cuda")
    expected = reference(folder)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16") if device.type == "cuda" else ("float32",)
    for dtype in dtypes:
        worker, peer = start_tiny_worker(folder, dtype), Peer(device.type)
        try:
            first = train_step(worker)
            _same_numbers(first, expected, dtype)
            contents = _contents(worker)
            _lease(worker, peer, device)
            _offload(worker, peer, device)
        finally:
            peer.close()
            worker.close()
        _again(folder, dtype, first, contents, device)


def _again(
    folder: str, dtype: Dtype, first: dict[str, Any], contents: list[int], device: torch.device
) -> None:
    """Repeat the step with a new worker: on CPU its bits are the first's; a GPU's difference is printed."""
    worker = start_tiny_worker(folder, dtype)
    try:
        second = train_step(worker)
        same = {
            "log-probs before": first["before"] == second["before"],
            "gradient norm": first["grad_norm"] == second["grad_norm"],
            "log-probs after": first["after"] == second["after"],
            "parameters": contents == _contents(worker),
        }
    finally:
        worker.close()
    others = ", ".join(name for name, equal in same.items() if not equal)
    name = f"{dtype}: a second worker's step has the same bits"
    if device.type == "cuda":
        show(name, f"not in {others}" if others else "in all")
    else:
        check(not others, name, others)


def _same_numbers(ours: dict[str, Any], cpu: dict[str, Any], dtype: str) -> None:
    apart = {name: np.abs(np.array(ours[name]) - np.array(cpu[name])) for name in ("before", "after")}
    if dtype == "bfloat16":
        checks = [("before", "median", float(np.median(apart["before"])), MEDIAN_DIFFERENCE)]
    else:
        bounds = {"before": LARGEST_DIFFERENCE, "after": LARGEST_DIFFERENCE_AFTER}
        checks = [(name, "largest", float(apart[name].max()), bound) for name, bound in bounds.items()]
    for name, which, value, bound in checks:
        check(value < bound, f"{dtype}: log-probs {name} the step, {which} difference", f"{value:.1e}")
    moved = float(np.abs(np.array(ours["after"]) - np.array(ours["before"])).max())
    check(moved > 10 * LARGEST_DIFFERENCE, f"{dtype}: the step moved log-probs by", f"{moved:.1e}")
    error = abs(ours["grad_norm"] / cpu["grad_norm"] - 1)
    check(error < LARGEST_GRADIENT_ERROR[dtype], f"{dtype}: error of the gradient's norm", f"{error:.1e}")


def _lease(worker: MegatronWorker, peer: Peer, device: torch.device) -> None:
    memory = worker.policy.memory
    with peer.leased(memory, device) as read:
        size = sum(buffer.param_data.nbytes for buffer in memory.buffers) >> 20
        check(read == _contents(worker), "the second process reads the leased parameters", f"{size} MiB")
        check(_raises(WeightSyncError, worker.offload), "off-loading under a live lease is refused")


def _offload(worker: MegatronWorker, peer: Peer, device: torch.device) -> None:
    """Off-loading frees memory for another process; reloading brings the same bits."""
    memory = worker.policy.memory
    before, generation, held = _contents(worker), memory.generation, _held(worker, device)
    visible = _visible(peer, device)
    worker.offload()
    freed, seen = held - _held(worker, device), _visible(peer, device) - visible
    worker.reload()
    least = sum(b.param_data.nbytes + b.grad_data.nbytes for b in memory.buffers)
    check(
        freed >= least // 2,
        "off-loading frees parameters and gradients",
        f"{freed >> 20} MiB of {held >> 20}",
    )
    if device.type == "cuda":
        check(seen >= 0.9 * freed, "the second process sees that memory free", f"{seen >> 20} MiB")
    check(memory.generation == generation + 1, "the reloaded memory has a new generation")
    check(_contents(worker) == before, "the reloaded parameters are the same to the last bit")
    check(worker.forward(make_batch()) is not None, "the reloaded worker computes")


def _held(worker: MegatronWorker, device: torch.device) -> int:
    """Return the bytes that this process has of the device, or of shared memory on CPU."""
    return (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else worker.policy.memory.shared_bytes()
    )


def _visible(peer: Peer, device: torch.device) -> int:
    """Return the device's free bytes as the second process sees them; 0 on CPU."""
    return peer.call("free_bytes") if device.type == "cuda" else 0


def _contents(worker: MegatronWorker) -> list[int]:
    return [digest_bytes(flat_bytes(buffer.param_data)) for buffer in worker.policy.memory.buffers]


def _raises(kind: type[Exception], action: Callable[[], object]) -> bool:
    try:
        action()
    except kind:
        return True
    return False
