"""Compare the weight sync of two processes on one GPU (CUDA IPC) with three other ways.

    python -m benchmarks.resharding.one_gpu

Needs torch, numpy, pyzmq, pydantic, xxhash and psutil. `--device cpu` runs the same steps in shared memory.

- weight sync: `PlannedSync` into a real receiver; on one slot all bytes come from leased memory
- proved: the same with a proof, which digests every byte once at both ends
- handle per tensor: every checkpoint tensor is exported, opened, loaded and dropped by itself, at every sync
- single buffer: one straight copy of as many bytes from the leased buffers, into no particular place
- digest: of one run of bytes, in one process
- device copy: in one process; its speed is the reference of the others
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
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire import memory
from mrl.resharding.wire.device_digest import weighted_sum

GB = 1e9
TARGET = 0.7
"""Share of a device copy's speed that a weight sync's copies must reach."""
_DEADLINE_SECONDS = 300.0
_ROWS = (
    ("device_copy_seconds", "device copy"),
    ("single_buffer_seconds", "single buffer"),
    ("local_lane_seconds", "weight sync, its copies"),
    ("sync_seconds", "weight sync, whole session"),
    ("proved_sync_seconds", "weight sync, whole session, proved"),
    ("trainer_proof_seconds", "  of it the trainer's digests"),
    ("digest_seconds", "digest of one run"),
    ("handle_per_tensor_seconds", "handle per tensor"),
)


class WholeCheckpoint:
    """Every checkpoint tensor in its own memory, as in a trainer that gathered them one by one."""

    def __init__(self, checkpoint: list[CheckpointTensor], device: torch.device, *, version: int) -> None:
        made, self._segments = MadeUp(checkpoint, version=version), []
        for tensor in checkpoint:
            segment = memory.allocate(math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize, device)
            box = made.box(tensor.name, (0,) * len(tensor.shape), tensor.shape, tensor.dtype)
            segment.buffer.view(DTYPES[tensor.dtype]).view(tensor.shape).copy_(box)
            self._segments.append(segment)

    def describe(self) -> list[dict[str, Any]]:
        """Return one fresh handle per tensor, to be opened once."""
        return describe(self._segments)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def measure(
    model: str, *, scale: float, device: torch.device, bucket_bytes: int, repeats: int
) -> dict[str, Any]:
    """Return all figures by name; seconds are medians over `repeats`, after one warm-up each."""
    hf = models.config_of(model, scale=scale, train=Layout())
    trainer = BenchTrainer(hf, Layout(), 0, device=device)
    trainer.fill(1)
    manifest = engine_manifests.engine_rank_manifests(hf, Layout())
    slot = Child(StorageSlot, manifest[0], _DEADLINE_SECONDS, device, seconds=4 * _DEADLINE_SECONDS)
    figures, same_digest = _in_one_process(device, min(1 << 30, trainer.memory.num_bytes), repeats)
    synced = _Sync(trainer, slot, manifest, bucket_bytes)
    figures |= synced.measure(repeats)
    figures["single_buffer_seconds"] = _timed(
        lambda: slot.call("copy_plainly", trainer.memory.describe()), repeats
    )
    differences = synced.close()
    whole = WholeCheckpoint(trainer.checkpoint, device, version=2)
    slot.call("poison")
    figures["handle_per_tensor_seconds"] = _timed(
        lambda: slot.call("load_handles", trainer.checkpoint, whole.describe()), repeats
    )
    differences += slot.call("differences", trainer.checkpoint, 2)
    whole.close()
    slot.close()
    trainer.close()
    wrong = [difference for difference in differences if difference]
    wrong += [] if same_digest else ["the digest of a run differs from the same formula's on the CPU"]
    return {
        "model": model, "scale": scale, "device": name_of(device), "torch": torch.__version__,
        "weights_bytes": manifest[0].num_bytes, "tensors": len(trainer.checkpoint), **figures,
        "local_lane_over_device_copy": _share(figures, "local_lane_seconds", manifest[0].num_bytes),
        "check": wrong or "every byte as expected",
    }  # fmt: skip


class _Sync:
    """Sessions of the weight sync from version to version."""

    def __init__(
        self, trainer: BenchTrainer, slot: Child, manifest: list[RankManifest], bucket_bytes: int
    ) -> None:
        # Nothing crosses slots, so only sessions with a proof digest anything.
        sync = SyncSection(bucket_bytes=bucket_bytes, deadline_seconds=_DEADLINE_SECONDS)
        self._trainer, self._slot, self._version = trainer, slot, -1
        self._weight_sync = PlannedSync(
            trainer, sync, slot.call("addresses"), manifest, topology=Topology.shared_slots([0])
        )

    def measure(self, repeats: int) -> dict[str, float]:
        """Return median seconds of sessions without and with a proof, after a warm-up, and of their parts."""
        plain = [self._session(full=False) for _ in range(repeats + 1)][1:]
        proved = [self._session(full=True) for _ in range(repeats + 1)][1:]
        return {
            "sync_seconds": statistics.median(stats["whole_seconds"] for stats in plain),
            "local_lane_seconds": statistics.median(stats["load_seconds"] for stats in plain),
            "proved_sync_seconds": statistics.median(stats["whole_seconds"] for stats in proved),
            "trainer_proof_seconds": statistics.median(stats["prove_seconds"] for stats in proved),
        }

    def _session(self, *, full: bool) -> dict[str, float]:
        session = Session.new(self._version, self._version + 1, self._weight_sync.digest, full=full)
        self._version += 1
        self._slot.start("receive", session)
        started = time.monotonic()
        stats = self._weight_sync.send(session)
        whole = time.monotonic() - started
        self._slot.result()
        return stats | {"whole_seconds": whole}

    def close(self) -> list[str | None]:
        """Sync once more; return the first difference from the sent bytes, or None, in a list."""
        self._slot.call("poison")
        self._session(full=False)
        differences = self._slot.call("differences", self._trainer.checkpoint, 1)
        self._slot.call("release")
        self._weight_sync.close()
        return differences


def _timed(action: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of the whole call, as the trainer sees it."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.monotonic()
        action()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


def _in_one_process(device: torch.device, num_bytes: int, repeats: int) -> tuple[dict[str, float], bool]:
    """Return (seconds per 10^9 bytes of a copy and of a digest, True if the digest equals the CPU's)."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)
        memory.synchronize(device)

    memory.synchronize(device)
    actions = {"device_copy": copy, "digest": lambda: weighted_sum(source)}
    seconds = {
        f"{name}_seconds_per_gb": _timed(action, repeats) * GB / num_bytes for name, action in actions.items()
    }
    return seconds, weighted_sum(source) == weighted_sum(source.cpu())


def _share(figures: dict[str, float], name: str, num_bytes: int) -> float:
    """Return the speed of moving `num_bytes` once in the named seconds, as a share of a device copy's."""
    return figures["device_copy_seconds_per_gb"] * num_bytes / GB / figures[name]


def table(report: dict[str, Any]) -> str:
    """Return the figures as one table, with the target and its verdict."""
    size, share = report["weights_bytes"], report["local_lane_over_device_copy"]
    seconds = {name: report[name] for name, _ in _ROWS if name in report}
    for name in ("device_copy", "digest"):
        seconds[f"{name}_seconds"] = report[f"{name}_seconds_per_gb"] * size / GB
    lines = [
        f"{report['model']} at scale {report['scale']:g}: {size / GB:.3f} GB in {report['tensors']} tensors",
        f"{report['device']}, torch {report['torch']}",
        f"{'':38}{'seconds':>10}{'GB/s':>10}{'of a device copy':>18}",
    ]
    for name, title in _ROWS:
        part = _share(report | seconds, name, size)
        lines.append(f"{title:38}{seconds[name]:10.4f}{size / GB / seconds[name]:10.1f}{part:18.0%}")
    verdict = "met" if share >= TARGET else "missed"
    lines.append(f"target: a weight sync's copies at {TARGET:.0%} of a device copy: {share:.0%}, {verdict}")
    return "\n".join([*lines, f"bytes: {report['check']}"])


def name_of(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu, shared memory in place of CUDA IPC"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0, or 1 if bytes are incorrect."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.resharding.one_gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=models.NAMES, default="qwen3-30b-a3b")
    parser.add_argument("--scale", type=float, default=0.4, help="share of layers, experts; 0.4 is 10 GB")
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
    print(table(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["check"] == "every byte as expected" else 1


if __name__ == "__main__":
    sys.exit(main())
