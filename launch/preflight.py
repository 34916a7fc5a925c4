"""Check every node before a model loads, and name the faulty ones.

`python -m mrl.launch.preflight CONFIG... --nodes N` runs on a running cluster (RAY_ADDRESS): it waits for N
nodes to join, compares their facts, and runs a small all-reduce with one process per node. Nodes gather facts
(node_facts); this module judges them, so that the rules can be tested without a cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from mrl.capacity.estimate import Estimate
from mrl.capacity.fit import fit
from mrl.capacity.hardware import gpu_node, load_hardware
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.data.hub_models import names_model
from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster.cluster import SLOT, address_of, join
from mrl.launch.cluster.gpus import disagreements
from mrl.launch.cluster.node_facts import NodeFacts, NodeProbe, RayPart, skew
from mrl.launch.cluster.ray_node import NODE_LABEL


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRequirements:
    """Minimum requirements of a node."""

    memory_bytes: int = 2 << 30
    host_bytes: int = 0
    """Peak host memory of a node's trainer ranks in a step, by the capacity estimate."""
    object_store_bytes: int = 0
    """Bytes that a step moves through a node's Ray object store, by the estimate; Ray spills the rest."""
    slots_per_node: int | None = None
    """launch.slots_per_node: the intended number of slots, also on a node with more GPUs."""
    shared_memory_bytes: int = 256 << 20
    disk_bytes: int = 1 << 30
    disk_bytes_per_second: float = 20e6
    open_files: int = 1024
    clock_skew_seconds: float = 5.0
    gpu_free_share: float = 0.9
    gloo_bytes_per_second: float = 2e5
    nccl_bytes_per_second: float = 1e9
    """Bandwidth of one GPU per node; a network that fell back to plain sockets is slower."""

    @classmethod
    def of(cls, config: Config, *, slots: int, gpus: bool) -> NodeRequirements:
        """Return the requirements of the run's model and layout for a node with `slots` slots."""
        intended = config.launch.slots_per_node
        if not names_model(config.model.path):
            return cls(slots_per_node=intended)
        # Trainer memory depends only on the number of slots, not on the rest of the hardware.
        hardware = load_hardware("8x80gb").model_copy(update={"gpus_per_node": slots})
        estimate = Estimate(config, hardware)
        peak = max(moment.total for moment in estimate.host) if gpus else 0
        return cls(slots_per_node=intended, host_bytes=peak, object_store_bytes=estimate.object_store_bytes)


def node_faults(facts: Sequence[NodeFacts], floors: NodeRequirements) -> list[str]:
    """Return one sentence per fault, starting with the node; versions are compared with the majority."""
    faults = []
    for name in sorted({key for node in facts for key in node.versions}):
        values = [node.versions.get(name, "absent") for node in facts]
        usual = max(set(values), key=lambda v: (values.count(v), -values.index(v)))
        faults += [
            f"{node.name}: {name} is {value}, on the other nodes {usual}"
            for node, value in zip(facts, values, strict=True)
            if value != usual
        ]
    for node in facts:
        faults += [f"{node.name}: {text}" for text in _low(node, floors)]
    return faults


def too_few_slots(needed: int, facts: Sequence[NodeFacts]) -> list[str]:
    """Return a fault if all nodes together have fewer slots than the layout needs."""
    slots = [node.ray.slots for node in facts]
    if sum(slots) >= needed:
        return []
    return [
        f"the layout needs {needed} slots, the nodes have {' + '.join(map(str, slots))} (Ray "
        f"resource {SLOT}): start more nodes or choose a smaller layout"
    ]


def gpu_memory_faults(config: Config, facts: Sequence[NodeFacts]) -> list[str]:
    """Return a fault if the run cannot fit the GPU with least free memory, by the capacity estimate."""
    free = [size for node in facts for size in node.gpus.free_bytes]
    if not free or not names_model(config.model.path):
        return []
    refusal = fit(config, gpu_node(max(node.ray.slots for node in facts), free)).refusal
    return [refusal] if refusal else []


def idle_nodes(needed: int, facts: Sequence[NodeFacts]) -> list[str]:
    """Return the names of the nodes that have no slot in the layout."""
    taken = [sum(node.ray.slots for node in facts[:number]) for number in range(len(facts))]
    return [node.name for node, before in zip(facts, taken, strict=True) if before >= needed]


def _low(node: NodeFacts, floors: NodeRequirements) -> list[str]:
    checks: list[tuple[str, float, float, str]] = [
        ("free memory", node.memory_bytes, floors.memory_bytes, "bytes"),
        (
            "free memory, which trainers need for weights and optimizer state while engines serve (--mem=0 "
            "gives a Slurm job all memory of a node),",
            node.memory_bytes,
            floors.host_bytes,
            "bytes",
        ),
        (
            "free shared memory (/dev/shm), which Ray's object store uses (launch.object_store_bytes),",
            node.shared_memory_bytes,
            node.ray.object_store_bytes,
            "bytes",
        ),
        (
            "Ray's object store (launch.object_store_bytes; null: a tenth of the memory, at most half of "
            "free /dev/shm), which carries a step's samples,",
            node.ray.object_store_bytes,
            floors.object_store_bytes,
            "bytes",
        ),
        ("free shared memory (/dev/shm)", node.shared_memory_bytes, floors.shared_memory_bytes, "bytes"),
        ("free disk space of the run folder", node.disk_bytes, floors.disk_bytes, "bytes"),
        (
            "write speed of the run folder",
            node.disk_bytes_per_second,
            floors.disk_bytes_per_second,
            "bytes/s",
        ),
        ("limit of open files", node.open_files, floors.open_files, ""),
    ]
    faults = [
        f"{name} is {value:.3g} {unit}, needed {floor:.3g}"
        for name, value, floor, unit in checks
        if value < floor
    ]
    if abs(node.clock_skew_seconds) > floors.clock_skew_seconds:
        faults.append(f"its clock is {node.clock_skew_seconds:+.1f} s off the driver's")
    faults += [
        f"GPU {number} has {share:.0%} of its memory free, needed {floors.gpu_free_share:.0%}: another "
        "process uses it"
        for number, share in node.gpus.used_shares().items()
        if share < floors.gpu_free_share
    ]
    faults += disagreements(node.gpus, ray=node.ray.gpus, slots=floors.slots_per_node)
    if node.error:
        faults.append(node.error)
    return faults


def check_nodes(
    config: Config, *, num_nodes: int, floors: NodeRequirements | None = None, deadline_seconds: float = 300.0
) -> list[NodeFacts]:
    """Return the facts of all nodes by number, over a connected Ray. WorkerLost names every fault and its
    node."""
    start = time.monotonic()
    nodes = wait_for_nodes(num_nodes, deadline_seconds=deadline_seconds)
    parts = [RayPart.of(node["Resources"]) for node in nodes]
    floors = floors or NodeRequirements.of(
        config, slots=max(part.slots for part in parts), gpus=any(part.gpus for part in parts)
    )
    remaining = max(30.0, deadline_seconds - (time.monotonic() - start))
    probes = _probes(nodes)
    try:
        facts = _gather_all(nodes, probes, config.run_folder, remaining)
        faults = [*node_faults(facts, floors), *too_few_slots(config.num_slots, facts)]
        faults = faults or gpu_memory_faults(config, facts)
        if not faults and num_nodes > 1:
            faults = _all_reduce(nodes, probes, floors, remaining)
    finally:
        _end(probes)
    if faults:
        raise WorkerLost(f"preflight found {len(faults)} faults:\n  " + "\n  ".join(faults))
    return facts


def wait_for_nodes(num_nodes: int, *, deadline_seconds: float) -> list[dict[str, Any]]:
    """Return Ray's living nodes by launcher's number. Raises WorkerLost if some do not join."""
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
    # Reserve all GPUs of the node: none is in use yet, and the all-reduce runs on the first.
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
        raise WorkerLost(f"preflight: {', '.join(names)} did not respond within {deadline_seconds:g} s")
    facts = ray.get(calls)
    return [
        dataclasses.replace(
            fact, clock_skew_seconds=_skew(probe, deadline_seconds), ray=RayPart.of(node["Resources"])
        )
        for fact, probe, node in zip(facts, probes, nodes, strict=True)
    ]


def _skew(probe: Any, deadline_seconds: float) -> float:
    import ray

    sent_at = time.time()
    node_time: Any = ray.get(probe.clock.remote(), timeout=deadline_seconds)
    return skew(sent_at, node_time, time.time())


def _all_reduce(
    nodes: Sequence[dict[str, Any]], probes: Sequence[Any], floors: NodeRequirements, deadline_seconds: float
) -> list[str]:
    """Return the faults of an all-reduce with one process per node, over NCCL if all have GPUs, else gloo."""
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
    faults = []
    for number, (node, call) in enumerate(zip(nodes, calls, strict=True)):
        name = f"node {number} ({node['NodeManagerAddress']})"
        try:
            speed = float(ray.get(call, timeout=0.1))
        except Exception as error:  # becomes a sentence that names the node
            reason = str(error).strip().splitlines()[-1]
            faults.append(f"{name}: the all-reduce over {backend} failed: {reason}")
            continue
        if speed < floor:
            faults.append(
                f"{name}: an all-reduce over {backend} sends {speed:.3g} bytes/s, needed {floor:.3g}"
            )
    return faults


def _on(node: dict[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def main(arguments: Sequence[str]) -> int:
    """Run the checks; return 0 if all pass, 1 with the faults on stderr, 2 for a bad configuration."""
    import ray

    parser = argparse.ArgumentParser(prog="python -m mrl.launch.preflight", description=__doc__)
    parser.add_argument("config", nargs="+")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds for all nodes to respond; 300 by default"
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(*options.config)
        join(address_of(config.launch) or "auto", head_seconds=options.deadline)
        facts = check_nodes(config, num_nodes=options.nodes, deadline_seconds=options.deadline)
        for node in facts:
            print(f"preflight: {node.line()}", flush=True)
        if idle := idle_nodes(config.num_slots, facts):
            print(f"preflight: the layout uses no slot of {', '.join(idle)}: start fewer nodes", flush=True)
    except (WorkerLost, ConfigError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
