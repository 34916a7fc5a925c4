"""Measure the weight sync on real trainer and engine ranks, by boxes and by whole tensors, without Ray.

    torchrun --nproc-per-node N -m benchmarks.resharding \\
        --model qwen3-30b-a3b --scale 0.1 --train 2,1,4 --rollout 2

One process per slot is a trainer rank with storage in Megatron's layout; it starts its engine rank as a
second process. The weight sync's own classes move weights. With several nodes, start torchrun on each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resharding import models
from benchmarks.resharding.engine_slots import EngineKind
from benchmarks.resharding.measure import KINDS, measure
from benchmarks.resharding.report import show
from benchmarks.resharding.world import Rank, barrier
from mrl.errors import ConfigError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests as engine_manifests
from mrl.resharding.planner import quantised, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest

RECEIVERS = {
    "storage": "one process per slot, storages in the engine's loader layout (no engine: nothing is "
    "processed)",
    "vllm": "real vLLM engines, their own loaders and processing",
}
FORMS = ("none", "fp8_block")
_GIB = 1 << 30
_PROCESS_BYTES = 300 << 20
"""Bytes of an idle process that imported torch."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0, or 1 for incorrect bytes; raise ConfigError if it cannot run."""
    options = arguments().parse_args(argv)
    torch.set_num_threads(options.threads)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    train, rollout = layouts(options, world)
    hf = models.config_of(options.model, scale=options.scale, train=train)
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.deadline))
    bucket_bytes = int(options.bucket_mib * (1 << 20))
    manifests = receiver_manifests(options, hf, rollout)
    require_memory(options, hf, train, manifests, bucket_bytes)
    engine = EngineKind(rollout.tp, options.quantize) if options.receivers == "vllm" else None
    per_node = options.slots_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    bench = Rank(
        hf, train, manifests, rank, engine=engine, deadline_seconds=options.deadline, slots_per_node=per_node
    )
    report: dict[str, Any] = {
        "command": " ".join(sys.argv if argv is None else argv),
        "model": options.model,
        "scale": options.scale,
        "hf_config": hf,
        "weights_bytes": sum(2 * math.prod(t.shape) for t in bench.trainer.checkpoint),
        "train": str(train),
        "rollout": str(rollout),
        "quantize": options.quantize,
        "slots": world,
        "transport": transport(world, per_node),
        "receivers": RECEIVERS[options.receivers],
        "bucket_bytes": bucket_bytes,
        "threads": options.threads,
        "torch": torch.__version__,
        "loadavg": Path("/proc/loadavg").read_text().split()[0],
    }
    try:
        report |= measure(
            bench,
            modes=("planned", "whole") if options.mode == "both" else (options.mode,),
            kinds=options.verify,
            bucket_bytes=bucket_bytes,
            repeats=options.repeats,
            warm_up=options.warm_up,
            check=options.check,
        )
    finally:  # a receiver's process ends only when it is closed
        bench.close()
    if rank == 0:
        show(report)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    barrier()  # torchrun ends all ranks as soon as one returns an error
    if world > 1:
        dist.destroy_process_group()
    return 1 if any(run["check_passed"] is False for run in report["runs"]) else 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.resharding", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=models.NAMES, default="tiny")
    parser.add_argument("--scale", type=float, default=1.0, help="share of layers, experts, vocabulary rows")
    parser.add_argument("--train", default="1,1,1", help="tp,pp,ep of the trainer; dp fills the world")
    parser.add_argument("--rollout", type=int, default=1, help="tp of an engine; engines fill the world")
    parser.add_argument("--quantize", choices=FORMS, default="none", help="form of engines' linear weights")
    parser.add_argument("--mode", choices=("planned", "whole", "both"), default="both")
    parser.add_argument("--verify", nargs="+", choices=KINDS, default=list(KINDS), help="sync.verify values")
    parser.add_argument("--receivers", choices=RECEIVERS, default="storage", help="what receives the weights")
    parser.add_argument("--slots-per-node", type=int, help="slots that share memory (default: a machine's)")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=5, help="measured sessions; medians are reported")
    parser.add_argument("--warm-up", type=int, default=2, help="sessions before measuring, at least 1")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--deadline", type=float, default=300.0, help="longest single wait in seconds")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="most memory that this node may need")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare every byte, not timed"
    )
    return parser


def transport(slots: int, slots_per_node: int) -> str:
    """Return how bytes of other slots arrive.

    >>> transport(4, 1), transport(1, 1)
    ('gloo', 'memory of the node')
    """
    if slots <= slots_per_node:
        return "memory of the node"
    return "gloo" if slots_per_node == 1 else "memory inside a node, gloo between"


def layouts(options: argparse.Namespace, world: int) -> tuple[Layout, Layout]:
    """Return (trainer, engines) layouts; raise ConfigError if they do not divide the world."""
    try:
        tp, pp, ep = (int(part) for part in options.train.split(","))
    except ValueError as error:
        raise ConfigError(f"--train {options.train!r} must be tp,pp,ep: three numbers") from error
    if world % (tp * pp) or world % options.rollout:
        raise ConfigError(
            f"--train tp x pp = {tp} x {pp} and --rollout {options.rollout} must divide the {world} ranks"
        )
    return (
        Layout(tp=tp, pp=pp, ep=ep, dp=world // (tp * pp)),
        Layout(tp=options.rollout, dp=world // options.rollout),
    )


def receiver_manifests(
    options: argparse.Namespace, hf: dict[str, Any], rollout: Layout
) -> list[RankManifest]:
    """Build every engine rank's manifest, without an engine."""
    return quantised.manifests(engine_manifests.engine_rank_manifests(hf, rollout), options.quantize)


def require_memory(
    options: argparse.Namespace,
    hf: dict[str, Any],
    train: Layout,
    manifests: list[RankManifest],
    bucket_bytes: int,
) -> None:
    """Raise ConfigError, before large allocations, if the node needs more than --memory-gib.

    Per slot: both sides' weights (engines: also the plain copy's), one mode's buckets, and the processes."""
    engines = options.receivers == "vllm"
    rollout_bytes = max(m.num_bytes for m in manifests) * (2 if engines else 1)
    train_bytes = max(m.num_bytes for m in trainer_manifests.trainer_rank_manifests(hf, train))
    processes = (4 if engines else 2) * _PROCESS_BYTES
    slots = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = slots * (rollout_bytes + train_bytes + 8 * bucket_bytes + processes)
    if needed > options.memory_gib * _GIB:
        raise ConfigError(
            f"{options.model} at scale {options.scale} needs about {needed / _GIB:.1f} GiB on this node, but "
            f"--memory-gib is {options.memory_gib}; lower --scale"
        )


if __name__ == "__main__":
    sys.exit(main())
