"""Print the benchmark's figures. The JSON file has all of them and more."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

GB = 1e9
MIB = 1 << 20
PHASES = (
    "pack",
    "exchange",
    "sender_wait",
    "wait",
    "check",
    "unpack",
    "process",
    "prove",
    "commit",
    "processor",
)


def show(report: dict[str, Any]) -> None:
    console = Console(width=150, highlight=False)
    console.print(
        f"{report['model']} scale {report['scale']}: {report['weights_bytes'] / GB:.3f} GB of weights, "
        f"train {report['train']}, rollout {report['rollout']} ({report['quantize']}), {report['slots']} "
        f"slots, buckets {report['bucket_bytes'] / MIB:.0f} MiB, {report['threads']} thread(s) per process, "
        f"load {report['loadavg']}\nreceivers: {report['receivers']}; "
        f"between slots, both modes: {report['transport']}"
    )
    plain = report["plain_copy"]
    console.print(
        f"plain copy, all receivers at once: {plain['seconds']:.3f} s, {plain['gb_per_second']:.2f} GB/s"
    )
    console.print(_times(report))
    console.print(_memory(report))
    for ratio, value in (report["planned_over_whole"] or {}).items():
        console.print(
            f"planned moves {value:.2f} times faster than whole tensors ({ratio.replace('_', ' ')})"
        )


def _times(report: dict[str, Any]) -> Table:
    table = Table(title="seconds: median session, slowest rank; phases: mean of the ranks, overlapping")
    phases = (name.replace("_", " ") for name in PHASES)
    columns = ("mode", "verify", "moving", "GB/s", "x plain", *phases, "plan once")
    for name in columns:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for run in report["runs"]:
        seconds = run["seconds"]
        phases = [f"{seconds[name]:.3f}" for name in PHASES]
        table.add_row(
            run["mode"],
            run["verify"],
            f"{seconds['moving']:.3f}",
            f"{run['gb_per_second']:.2f}",
            f"{run['times_plain_copy']:.2f}",
            *phases,
            f"{run['plan_seconds']:.2f}",
        )
    return table


def _memory(report: dict[str, Any]) -> Table:
    limit = 2 * report["bucket_bytes"] + report["largest_module_bytes"]
    table = Table(
        title="bytes over all slots; peak memory of one slot "
        f"(two buckets and the largest module: {limit / MIB:.0f} MiB)"
    )
    for name in (
        "mode",
        "verify",
        "local GB",
        "from other slots GB",
        "over lower bound",
        "peak extra MiB (first session)",
        "check",
    ):
        table.add_column(name, justify="left" if name in ("mode", "check") else "right")
    for run in report["runs"]:
        moved = run["bytes"]
        table.add_row(
            run["mode"],
            run["verify"],
            f"{moved['local'] / GB:.3f}",
            f"{moved['received_from_other_slots'] / GB:.3f}",
            f"{moved['ratio_to_lower_bound']:.3f}",
            _peak(run["peak_extra_bytes"]),
            run["check"],
        )
    return table


def _peak(extra: dict[str, int]) -> str:
    first = extra["shared_buckets"] + extra["private_first_session"]
    return f"{extra['total'] / MIB:.0f} ({first / MIB:.0f})"
