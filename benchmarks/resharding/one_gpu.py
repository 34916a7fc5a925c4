"""python -m benchmarks.resharding.one_gpu: two processes on one GPU over CUDA IPC, the planned weight sync
against three other ways.

Has not run on a GPU yet; `--device cpu` runs the same steps over shared memory.

- weight sync: `PlannedSync` into a real receiver; on one slot every byte takes the local lane, out of leased memory
- handle per tensor: every checkpoint tensor exported, opened, loaded and dropped by itself, at every sync
- single buffer: one straight copy of as many bytes out of the leased buffers, nothing put in its place
- device copy: inside one process, the speed the others are measured against
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.resharding import models
from benchmarks.resharding.child import Child
from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.slots import StorageSlot
from benchmarks.resharding.trainer import BenchTrainer, describe
from mrl.config.sections.sync import SyncSection
from mrl.errors import ConfigError
from mrl.models.layout import Layout
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner import engine_manifests
from mrl.resharding.transfer.assembly import DTYPES
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.weight_sync import PlannedSync
from mrl.resharding.wire import memory

GB = 1e9
_DEADLINE_SECONDS = 300.0


class WholeCheckpoint:
    """Every checkpoint tensor in memory of its own, as a trainer that gathered them one by one has it."""

    def __init__(self, checkpoint: list[CheckpointTensor], device: torch.device, *, version: int) -> None:
        made, self._segments = MadeUp(checkpoint, version=version), []
        for tensor in checkpoint:
            segment = memory.allocate(math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize, device)
            box = made.box(tensor.name, (0,) * len(tensor.shape), tensor.shape, tensor.dtype)
            segment.buffer.view(DTYPES[tensor.dtype]).view(tensor.shape).copy_(box)
            self._segments.append(segment)

    def describe(self) -> list[dict[str, Any]]:
        """One fresh handle each; to be opened once."""
        return describe(self._segments)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def measure(
    model: str, *, scale: float, device: torch.device, bucket_bytes: int, repeats: int
) -> dict[str, Any]:
    """All figures, by name; seconds are medians over `repeats` after one warm-up each."""
    hf = models.config_of(model, scale=scale, train=Layout())
    trainer = BenchTrainer(hf, Layout(), 0, device=device)
    trainer.fill(1)
    manifest = engine_manifests.from_layout(hf, Layout())
    slot = Child(StorageSlot, manifest[0], _DEADLINE_SECONDS, device, seconds=4 * _DEADLINE_SECONDS)
    device_copy = _device_copy(device, min(1 << 30, trainer.memory.num_bytes), repeats)
    planned = _sync(trainer, slot, manifest, bucket_bytes, repeats)
    single = _timed(lambda: slot.call("copy_plainly", trainer.memory.describe()), repeats)
    whole = WholeCheckpoint(trainer.checkpoint, device, version=2)
    slot.call("poison")
    handles = _timed(lambda: slot.call("load_handles", trainer.checkpoint, whole.describe()), repeats)
    differences = planned.pop("differences") + slot.call("differences", trainer.checkpoint, 2)
    whole.close()
    slot.close()
    trainer.close()
    moved = manifest[0].num_bytes
    wrong = [difference for difference in differences if difference]
    return {
        "model": model, "scale": scale, "device": name_of(device), "torch": torch.__version__, "weights_bytes": moved,
        "tensors": len(trainer.checkpoint), "device_copy_gb_per_second": device_copy, **planned,
        "single_buffer_seconds": single, "handle_per_tensor_seconds": handles,
        "local_lane_gb_per_second": moved / GB / planned["local_lane_seconds"],
        "local_lane_over_device_copy": moved / GB / planned["local_lane_seconds"] / device_copy,
        "handles_over_sync": handles / planned["sync_seconds"],
        "check": wrong or "every byte as expected",
    }  # fmt: skip


def _sync(
    trainer: BenchTrainer, slot: Child, manifest: list[Any], bucket_bytes: int, repeats: int
) -> dict[str, Any]:
    """Sessions of the planned weight sync without digests (nothing crosses slots, so nothing would be
    digested)."""
    sync = SyncSection(bucket_bytes=bucket_bytes, verify="off", deadline_seconds=_DEADLINE_SECONDS)
    weight_sync = PlannedSync(trainer, sync, slot.call("addresses"), manifest, slots_per_node=1)
    seconds, lane = [], []
    for number in range(repeats + 1):
        session = Session(f"{number:032x}", number - 1, number, weight_sync.digest, full=False)
        slot.start("receive", session)
        started = time.monotonic()
        stats = weight_sync.send(session)
        seconds.append(time.monotonic() - started)
        lane.append(stats["load_seconds"])
        slot.result()
    differences = slot.call("differences", trainer.checkpoint, 1)
    slot.call("release")
    weight_sync.close()
    return {
        "sync_seconds": statistics.median(seconds[1:]),
        "local_lane_seconds": statistics.median(lane[1:]),
        "differences": differences,
    }


def _timed(action: Callable[[], Any], repeats: int) -> float:
    """Median seconds of the whole call, as the trainer sees it."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.monotonic()
        action()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


def _device_copy(device: torch.device, num_bytes: int, repeats: int) -> float:
    """GB/s of one large copy, counting each byte once."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    memory.synchronize(device)

    def copy() -> None:
        target.copy_(source)
        memory.synchronize(device)

    return num_bytes / GB / _timed(copy, repeats)


def name_of(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu, shared memory in place of CUDA IPC"
    )


def main(argv: list[str] | None = None) -> int:
    """0; 1 when bytes are wrong."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.resharding.one_gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=models.NAMES, default="qwen3-30b-a3b")
    parser.add_argument(
        "--scale", type=float, default=0.4, help="share of layers, experts, vocabulary: 0.4 is 10 GB"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bucket-mib", type=float, default=256.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible; --device cpu runs the same steps over shared memory")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    report = measure(
        options.model,
        scale=options.scale,
        device=device,
        bucket_bytes=int(options.bucket_mib * (1 << 20)),
        repeats=options.repeats,
    )
    print(json.dumps(report, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["check"] == "every byte as expected" else 1


if __name__ == "__main__":
    sys.exit(main())
