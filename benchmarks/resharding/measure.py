"""Measurements in order: plain copies, then every mode and verification; medians over ranks and repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.resharding.world import Rank, Verify, gathered
from mrl.resharding.planner.manifest import RankManifest, tensor_bytes
from mrl.resharding.transfer.planned_sync import PlannedSync

GB = 1e9
KINDS: tuple[Verify, ...] = ("wire", "full")


def measure(
    rank: Rank,
    *,
    modes: Sequence[str],
    kinds: Sequence[Verify],
    bucket_bytes: int,
    repeats: int,
    warm_up: int,
    check: bool,
) -> dict[str, Any]:
    """Measure all modes and verifications; return the same report on every rank.

    The plan by boxes comes first: memory that an allocator kept from whole tensors would hide its needs."""
    needed = sum(m.num_bytes for m in rank.manifests)
    plain = [_plain_copy(rank) for _ in range(warm_up + repeats)][warm_up:]
    runs = []
    for mode in modes:
        for verify in kinds:
            run = _measure_one(rank, mode, verify, bucket_bytes, repeats, warm_up, check)
            runs.append({"mode": mode, "verify": verify} | run)
        plain += [_plain_copy(rank) for _ in range(repeats)]
    plain_seconds = statistics.median(plain)
    for run in runs:
        run["gb_per_second"] = needed / GB / run["seconds"]["moving"]
        run["times_plain_copy"] = run["seconds"]["moving"] / plain_seconds
    return {
        "bytes_needed": needed,
        "largest_module_bytes": max(_largest_module(m) for m in rank.manifests),
        "plain_copy": {
            "seconds": plain_seconds,
            "gb_per_second": needed / GB / plain_seconds,
            "every": plain,
        },
        "runs": runs,
        "planned_over_whole": _speedups(runs),
    }


def _measure_one(
    rank: Rank, mode: str, verify: Verify, bucket_bytes: int, repeats: int, warm_up: int, check: bool
) -> dict[str, Any]:
    with rank.weight_sync(mode, bucket_bytes=bucket_bytes, verify=verify) as (weight_sync, plan_seconds):
        started = time.monotonic()
        first_private = rank.peak(weight_sync)
        first = time.monotonic() - started
        for _ in range(warm_up - 1):
            rank.run(weight_sync)
        private = rank.peak(weight_sync)
        every = [_over_ranks(rank.run(weight_sync)) for _ in range(repeats)]
        if rank.rank == 0:
            moving = ", ".join(f"{session['moving']:.3f}" for session in every)
            print(f"{mode}, verify {verify}: moved in {moving} s", flush=True)
        difference = rank.difference(weight_sync, 1 + KINDS.index(verify)) if check else None
        moved = bytes_by_path(weight_sync)
    seconds = {name: statistics.median(session[name] for session in every) for name in every[0]}
    differences = [d for d in gathered(difference) if d]
    return {
        "plan_seconds": max(gathered(plan_seconds)),
        "first_session_seconds": max(gathered(first)),
        "seconds": seconds,
        "every_moving": [session["moving"] for session in every],
        "bytes": moved,
        "peak_extra_bytes": {
            "shared_buckets": 2 * bucket_bytes,
            "private": max(gathered(private)),
            "private_first_session": max(gathered(first_private)),
            "total": 2 * bucket_bytes + max(gathered(private)),
        },
        "check": (rank.right if not differences else differences[0]) if check else "not asked for",
        "check_passed": not differences if check else None,
    }


def _plain_copy(rank: Rank) -> float:
    return max(gathered(rank.copy_plainly()))


def _over_ranks(session: dict[str, float]) -> dict[str, float]:
    """Return the slowest rank's total and moving, and the ranks' mean of every phase."""
    sessions = gathered(session)
    slowest = {name: max(s[name] for s in sessions) for name in ("total", "moving")}
    return {name: statistics.mean(s[name] for s in sessions) for name in session} | slowest


def bytes_by_path(weight_sync: PlannedSync) -> dict[str, float]:
    """Return bytes over all slots, by how they reach the slots that need them."""
    summary = weight_sync.plan.summary()
    crossing = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    bound = summary["lower_bound_cross_slot_bytes"]
    return {
        "local": summary["bytes_local"],
        "in_node": summary["bytes_intra_node"],
        "across_nodes": summary["bytes_inter_node"],
        "received_from_other_slots": crossing,
        "lower_bound": bound,
        "ratio_to_lower_bound": crossing / bound if bound else 1.0,
        "whole": summary["whole_bytes"],
        "windows": summary["windows"],
        "message_bytes": sum(gathered(weight_sync.received_bytes)),
    }


def _largest_module(manifest: RankManifest) -> int:
    sizes: dict[str, int] = {}
    for tensor in manifest.tensors:
        module = tensor.name.rpartition(".")[0]
        sizes[module] = sizes.get(module, 0) + tensor_bytes(tensor)
    return max(sizes.values())


def _speedups(runs: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return how many times faster boxes move than whole tensors; None unless both were measured."""
    moving = {(run["mode"], run["verify"]): run["seconds"]["moving"] for run in runs}
    if len({run["mode"] for run in runs}) < 2:
        return None
    return {
        f"verify_{kind}": moving["whole", kind] / moving["planned", kind]
        for kind in dict.fromkeys(run["verify"] for run in runs)
    }
