"""A plan in words: bytes per lane and rank, copies, windows, memory, and how long it takes at stated link
speeds. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.schedule import SlotTraffic

GB = 1e9
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """GB/s per slot and direction; a local byte is read and written once by the memory."""

    across_nodes: float = 50.0
    """Network card (400 Gb/s)."""
    in_node: float = 450.0
    """Links between slots of one node (NVLink 4)."""
    memory: float = 3350.0
    """Device memory, reads and writes together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds by the slowest slot, were every link used at its speed."""

    network_seconds: float
    in_node_seconds: float
    memory_seconds: float
    windows_seconds: float
    """Sum over windows of the slowest slot's network time: what the windows' order loses shows here."""

    @property
    def bound_seconds(self) -> float:
        return max(self.network_seconds, self.in_node_seconds, self.memory_seconds)


def estimate(plan: Plan, speeds: LinkSpeeds = LinkSpeeds()) -> Estimate:
    """Time bounds of one sync from the plan's bytes."""
    local, intra_in, inter_in, intra_out, inter_out, _ = plan.traffic
    needed = local + intra_in + inter_in
    network = float(np.maximum(inter_in, inter_out).max(initial=0)) / GB / speeds.across_nodes
    in_node = float(np.maximum(intra_in, intra_out).max(initial=0)) / GB / speeds.in_node
    memory = 2 * float(needed.max(initial=0)) / GB / speeds.memory
    crossing = len(set(plan.topology.nodes)) > 1
    speed = speeds.across_nodes if crossing else speeds.in_node
    windows = sum(int(counts.max(initial=0)) for counts in window_traffic(plan)) / GB / speed
    return Estimate(network, in_node, memory, windows)


def window_traffic(plan: Plan) -> list[np.ndarray]:
    """[2, slots] bytes sent and received in each window."""
    traffic = SlotTraffic(plan.topology)
    totals = []
    for window in plan.windows:
        counts = np.zeros(traffic.num_lanes, dtype=np.int64)
        for step in window:
            item = plan.items[step.item]
            flow = traffic.of(item.pattern, item.ordinal, step.part, step.parts)
            counts[flow.lanes] += flow.num_bytes
        totals.append(counts.reshape(2, -1))
    return totals


def memory_bytes(plan: Plan) -> dict[str, int]:
    """Extra memory of the worst slot: a send bucket, two receive buckets, and the engine's largest module
    (staged modules need its size while they are loaded; with interleaved stages as many at once as there are
    stages)."""
    per_window = window_traffic(plan)
    sent = max((int(counts[0].max()) for counts in per_window), default=0)
    received = max((int(counts[1].max()) for counts in per_window), default=0)
    return {"send_bucket": sent, "receive_buckets": 2 * received, "largest_module": _largest_module(plan)}


def _largest_module(plan: Plan) -> int:
    from mrl.resharding.planner.manifest import module_of, tensor_bytes

    largest = 0
    for group in plan.engines:
        modules: dict[str, int] = {}
        for tensor in group.tensors:
            name = module_of(tensor.name)
            modules[name] = modules.get(name, 0) + tensor_bytes(tensor)
        largest = max(largest, *modules.values(), 0)
    return largest


def explain(plan: Plan, speeds: LinkSpeeds = LinkSpeeds()) -> str:
    """A page of text about a plan."""
    summary, seconds, memory = plan.summary(), estimate(plan, speeds), memory_bytes(plan)
    local, intra_in, inter_in, _, inter_out, copies = plan.traffic
    ratio = _ratio(summary)
    engines = np.array(plan.topology.engine_slots)
    trainers = np.array(plan.topology.trainer_slots)
    lines = [
        f"plan {plan.digest[:16]}: {len(trainers)} trainer ranks -> {len(engines)} engine ranks "
        f"on {summary['slots']} slots of {summary['nodes']} nodes",
        f"  {summary['tensors']} checkpoint tensors in {summary['patterns']} patterns, {summary['windows']} windows "
        f"of at most {summary['bucket_bytes'] / GIB:.3g} GiB per slot and direction",
        f"  bytes needed       {summary['bytes_needed'] / GB:12.3f} GB",
        f"    on the slot      {summary['bytes_local'] / GB:12.3f} GB",
        f"    inside the node  {summary['bytes_intra_node'] / GB:12.3f} GB",
        f"    across nodes     {summary['bytes_inter_node'] / GB:12.3f} GB",
        f"  lower bound of bytes between slots {summary['lower_bound_cross_slot_bytes'] / GB:.3f} GB, ratio {ratio:.3f}",
        f"  of it whole tensors  {summary['whole_bytes']} bytes",
        "  per rank                      min         mean          max",
        _spread("local GB", local[engines] / GB),
        _spread("from the node GB", intra_in[engines] / GB),
        _spread("from other nodes GB", inter_in[engines] / GB),
        _spread("to other nodes GB", inter_out[trainers] / GB),
        _spread("copies before joining", copies[engines].astype(float), digits=0),
        "  memory of the worst slot: "
        + ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3f} GiB" for name, size in memory.items()),
        f"  at {speeds.across_nodes:g} GB/s across nodes, {speeds.in_node:g} in the node, {speeds.memory:g} memory: "
        f"network {seconds.network_seconds:.3f} s, node {seconds.in_node_seconds:.3f} s, "
        f"memory {seconds.memory_seconds:.3f} s; bound {seconds.bound_seconds:.3f} s, "
        f"window by window {seconds.windows_seconds:.3f} s",
    ]
    return "\n".join(lines)


def _ratio(summary: dict[str, Any]) -> float:
    moved = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    bound = summary["lower_bound_cross_slot_bytes"]
    return moved / bound if bound else 1.0 + moved


def _spread(name: str, values: np.ndarray, *, digits: int = 3) -> str:
    columns = (values.min(initial=np.inf), values.mean() if values.size else 0.0, values.max(initial=0))
    return f"    {name:<21}" + "".join(f"{value:13.{digits}f}" for value in columns)
