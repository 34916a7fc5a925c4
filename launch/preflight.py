"""Looks at every node before a model loads, and names the bad one.

`python -m mrl.launch.preflight CONFIG... --nodes N` on a running cluster (RAY_ADDRESS): waits until N nodes
have joined, asks each for its facts, compares them, and runs a small all-reduce over one process of each
node. Facts are gathered on the nodes (node_facts); what is wrong with them is decided here (faults), so that
the rules can be tested without a cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster.cluster import SLOT, address_of, join
from mrl.launch.cluster.gpus import disagreements
from mrl.launch.cluster.node_facts import NodeFacts, NodeProbe, RayPart, skew
from mrl.launch.cluster.ray_node import NODE_LABEL


@dataclasses.dataclass(frozen=True, slots=True)
class Floors:
    """The least a node must have."""

    memory_bytes: int = 2 << 30
    host_bytes: int = 0
    """What the trainers of a node need of its host's memory at the worst moment of a step, by the capacity
    estimate."""
    object_store_bytes: int = 0
    """What a step moves through Ray's object store of a node, by the same estimate; Ray writes the rest to disk."""
    slots_per_node: int | None = None
    """The launcher's setting: that this many slots are meant, also on a node with more GPUs."""
    shared_memory_bytes: int = 256 << 20
    disk_bytes: int = 1 << 30
    disk_bytes_per_second: float = 20e6
    open_files: int = 1024
    clock_skew_seconds: float = 5.0
    gpu_free_share: float = 0.9
    gloo_bytes_per_second: float = 2e5
    nccl_bytes_per_second: float = 1e9
    """Of one GPU of each node; a network that fell back to plain sockets is below it."""

    @classmethod
    def of(cls, config: Config, *, slots: int, gpus: bool) -> Floors:
        """With what the run's model and layout need of a node of `slots` slots."""
        meant = config.launch.slots_per_node
        if not (Path(config.model.path) / "config.json").is_file():
            return cls(slots_per_node=meant)
        # What trainers keep depends on the number of slots alone, not on what else the hardware is.
        hardware = load_hardware("8x80gb").model_copy(update={"gpus_per_node": slots})
        estimate = Estimate(config, hardware)
        kept = max(moment.total for moment in estimate.host) if gpus else 0
        return cls(slots_per_node=meant, host_bytes=kept, object_store_bytes=estimate.object_store_bytes)


def node_faults(facts: Sequence[NodeFacts], floors: Floors) -> list[str]:
    """One sentence per fault, each starting with the node it is about; versions are compared with the
    majority."""
    found = []
    for name in sorted({key for node in facts for key in node.versions}):
        values = [node.versions.get(name, "absent") for node in facts]
        usual = max(set(values), key=lambda v: (values.count(v), -values.index(v)))
        found += [
            f"{node.name}: {name} is {value}, on the other nodes {usual}"
            for node, value in zip(facts, values, strict=True)
            if value != usual
        ]
    for node in facts:
        found += [f"{node.name}: {text}" for text in _low(node, floors)]
    return found


def too_few_slots(needed: int, facts: Sequence[NodeFacts]) -> list[str]:
    """Says that the nodes together have fewer slots than the layout takes."""
    slots = [node.ray.slots for node in facts]
    if sum(slots) >= needed:
        return []
    return [
        f"the layout takes {needed} slots, the nodes have {' + '.join(map(str, slots))} (Ray's resource {SLOT}): start "
        "more, or choose a smaller layout"
    ]


def idle_nodes(needed: int, facts: Sequence[NodeFacts]) -> list[str]:
    """Names of the last nodes that the layout leaves without a slot."""
    taken = [sum(node.ray.slots for node in facts[:number]) for number in range(len(facts))]
    return [node.name for node, before in zip(facts, taken, strict=True) if before >= needed]


def _low(node: NodeFacts, floors: Floors) -> list[str]:
    checks: list[tuple[str, float, float, str]] = [
        ("free memory", node.memory_bytes, floors.memory_bytes, "bytes"),
        (
            "free memory, where trainers keep weights and optimizer state while engines serve (a Slurm job has all of a "
            "node's with --mem=0),",
            node.memory_bytes,
            floors.host_bytes,
            "bytes",
        ),
        (
            "free shared memory (/dev/shm), where Ray's object store lies (launch.object_store_bytes),",
            node.shared_memory_bytes,
            node.ray.object_store_bytes,
            "bytes",
        ),
        (
            "Ray's object store (launch.object_store_bytes; null takes a tenth of the memory, at most half of what is free in "
            "/dev/shm), through which a step's samples go,",
            node.ray.object_store_bytes,
            floors.object_store_bytes,
            "bytes",
        ),
        ("free shared memory (/dev/shm)", node.shared_memory_bytes, floors.shared_memory_bytes, "bytes"),
        ("free disk of the run folder", node.disk_bytes, floors.disk_bytes, "bytes"),
        (
            "write speed of the run folder",
            node.disk_bytes_per_second,
            floors.disk_bytes_per_second,
            "bytes/s",
        ),
        ("limit of open files", node.open_files, floors.open_files, ""),
    ]
    found = [
        f"{what} is {value:.3g} {unit}, needed {floor:.3g}"
        for what, value, floor, unit in checks
        if value < floor
    ]
    if abs(node.clock_skew_seconds) > floors.clock_skew_seconds:
        found.append(f"its clock is {node.clock_skew_seconds:+.1f} s off the driver's")
    found += [
        f"GPU {number} has {share:.0%} of its memory free, needed {floors.gpu_free_share:.0%}: another process is on it"
        for number, share in node.gpus.used_shares().items()
        if share < floors.gpu_free_share
    ]
    found += disagreements(node.gpus, ray=node.ray.gpus, slots=floors.slots_per_node)
    if node.error:
        found.append(node.error)
    return found


def check_nodes(
    config: Config, *, num_nodes: int, floors: Floors | None = None, deadline_seconds: float = 300.0
) -> list[NodeFacts]:
    """Facts of all nodes by number, on a connected Ray. WorkerLost names every fault and its node."""
    start = time.monotonic()
    nodes = wait_for_nodes(num_nodes, deadline_seconds=deadline_seconds)
    parts = [RayPart.of(node["Resources"]) for node in nodes]
    floors = floors or Floors.of(
        config, slots=max(part.slots for part in parts), gpus=any(part.gpus for part in parts)
    )
    left = max(30.0, deadline_seconds - (time.monotonic() - start))
    probes = _probes(nodes)
    try:
        facts = _gather_all(nodes, probes, config.run_folder, left)
        found = [*node_faults(facts, floors), *too_few_slots(config.num_slots, facts)]
        if not found and num_nodes > 1:
            found = _all_reduce(nodes, probes, floors, left)
    finally:
        _end(probes)
    if found:
        raise WorkerLost(f"preflight found {len(found)} faults:\n  " + "\n  ".join(found))
    return facts


def wait_for_nodes(num_nodes: int, *, deadline_seconds: float) -> list[dict[str, Any]]:
    """Ray's living nodes, by the launcher's number; the missing numbers are named when time is up."""
    import ray

    deadline = time.monotonic() + deadline_seconds
    while True:
        alive = {int(n["Labels"].get(NODE_LABEL, -1)): n for n in ray.nodes() if n["Alive"]}
        missing = [number for number in range(num_nodes) if number not in alive]
        if not missing:
            return [alive[number] for number in range(num_nodes)]
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"nodes {missing} of {num_nodes} did not join within {deadline_seconds:g} s; see their logs"
            )
        time.sleep(0.5)


def _probes(nodes: Sequence[dict[str, Any]]) -> list[Any]:
    import ray

    actor = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
    # All GPUs of the node: none is in use yet, and the all-reduce runs on the first.
    return [
        actor.options(
            scheduling_strategy=_on(node), num_gpus=node.get("Resources", {}).get("GPU", 0)
        ).remote()
        for node in nodes
    ]


def _end(probes: Sequence[Any]) -> None:
    import ray

    for probe in probes:
        ray.kill(probe)


def _gather_all(
    nodes: Sequence[dict[str, Any]], probes: Sequence[Any], folder: str, deadline_seconds: float
) -> list[NodeFacts]:
    import ray

    calls = [probe.gather.remote(number, folder) for number, probe in enumerate(probes)]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=deadline_seconds)
    if late:
        names = [f"node {calls.index(ref)} ({nodes[calls.index(ref)]['NodeManagerAddress']})" for ref in late]
        raise WorkerLost(f"preflight: {', '.join(names)} did not answer within {deadline_seconds:g} s")
    facts = ray.get(calls)
    return [
        dataclasses.replace(
            fact, clock_skew_seconds=_skew(probe, deadline_seconds), ray=RayPart.of(node["Resources"])
        )
        for fact, probe, node in zip(facts, probes, nodes, strict=True)
    ]


def _skew(probe: Any, deadline_seconds: float) -> float:
    import ray

    asked = time.time()
    told: Any = ray.get(probe.clock.remote(), timeout=deadline_seconds)
    return skew(asked, told, time.time())


def _all_reduce(
    nodes: Sequence[dict[str, Any]], probes: Sequence[Any], floors: Floors, deadline_seconds: float
) -> list[str]:
    """Faults of an all-reduce over one process per node: by NCCL where every node has GPUs, else by gloo."""
    import ray

    port = ray.get(probes[0].open_port.remote(), timeout=60)
    address = nodes[0]["NodeManagerAddress"]
    backend = "nccl" if all(node.get("Resources", {}).get("GPU", 0) for node in nodes) else "gloo"
    floor = floors.nccl_bytes_per_second if backend == "nccl" else floors.gloo_bytes_per_second
    calls = [
        probe.join_all_reduce.remote(number, len(nodes), address, port, backend)
        for number, probe in enumerate(probes)
    ]
    ray.wait(calls, num_returns=len(calls), timeout=deadline_seconds)
    found = []
    for number, (node, call) in enumerate(zip(nodes, calls, strict=True)):
        name = f"node {number} ({node['NodeManagerAddress']})"
        try:
            speed = float(ray.get(call, timeout=0.1))
        except Exception as error:  # turned into a sentence that names the node
            reason = str(error).strip().splitlines()[-1]
            found.append(f"{name}: no all-reduce by {backend}: {reason}")
            continue
        if speed < floor:
            found.append(f"{name}: an all-reduce by {backend} sends {speed:.3g} bytes/s, needed {floor:.3g}")
    return found


def _on(node: dict[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def main(arguments: Sequence[str]) -> int:
    """0 when all is well; 1 with the faults on stderr."""
    import ray

    parser = argparse.ArgumentParser(prog="python -m mrl.launch.preflight", description=__doc__)
    parser.add_argument("config", nargs="+")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds until all nodes must have answered"
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(*options.config)
        join(address_of(config.launch) or "auto", head_seconds=options.deadline)
        facts = check_nodes(config, num_nodes=options.nodes, deadline_seconds=options.deadline)
        for node in facts:
            print(f"preflight: {node.line()}", flush=True)
        if idle := idle_nodes(config.num_slots, facts):
            print(f"preflight: the layout has no slot on {', '.join(idle)}: start fewer nodes", flush=True)
    except (WorkerLost, ConfigError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
