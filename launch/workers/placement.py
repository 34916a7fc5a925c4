"""Place slots in a stable order: by node (the launcher's number), then by GPU (Ray's name).

Ray does not guarantee an order of bundles over nodes or over a node's GPUs, so both are queried and sorted.
Node numbers come from the label `mrl-node` that the launcher gives each node, never from host names or
addresses. If engines have their own slots, the trainer's slots come first.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.cluster.cluster import SLOT
from mrl.launch.cluster.ray_node import NODE_LABEL
from mrl.resharding.planner.topology import Topology

HEAD_SECONDS = 5.0
"""Timeout for a response of Ray's head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One bundle of the placement group."""

    bundle: int
    node: int
    """Launcher's number of the node."""
    gpu: str = ""
    """GPU of the bundle as in CUDA_VISIBLE_DEVICES (a number or a UUID); empty without GPUs."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A placement group and its slots in rank order."""

    group: Any
    slots: tuple[Slot, ...]
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ray's node id -> launcher's number, for the nodes of the slots."""

    def topology(self, config: Config) -> Topology:
        """Return the topology of both sides for the weight sync plan; `config`: after `as_placed`."""
        if config.launch.engine_slots:
            return Topology.separate_pools(self.nodes, num_trainers=config.training.layout.world_size)
        return (
            Topology.shared_slots(self.nodes)
            if config.sync.transport == "auto"
            else Topology.separate_slots(self.nodes)
        )

    @property
    def gpus(self) -> bool:
        """True if each slot is a GPU."""
        return all(slot.gpu for slot in self.slots)

    @property
    def nodes(self) -> list[int]:
        """Node number of each slot."""
        return [slot.node for slot in self.slots]

    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        """Return the scheduling strategies that put an actor on the slot of each rank."""
        return [_on_bundle(self.group, self.slots[rank].bundle) for rank in ranks]

    def visible(self, ranks: Iterable[int]) -> dict[str, str]:
        """Return the CUDA_VISIBLE_DEVICES of these ranks' slots, in their order; empty without GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.slots[r].gpu for r in ranks)} if self.gpus else {}

    def lost_nodes(self) -> list[str]:
        """Return the run's nodes that Ray has lost, for messages; empty if its head does not respond. Uses a
        thread, because Ray waits for its head until it ends this process."""
        nodes: list[dict[str, Any]] = []

        def query() -> None:
            import ray

            nodes.extend(ray.nodes())

        thread = threading.Thread(target=query, name="lost nodes", daemon=True)
        thread.start()
        thread.join(HEAD_SECONDS)
        gone = {n["NodeID"]: n["NodeManagerAddress"] for n in [*nodes] if not n["Alive"]}
        return [
            f"node {number} ({gone[name]})" for name, number in sorted(self.numbers.items()) if name in gone
        ]

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def place(num_slots: int, *, gpus: bool, deadline_seconds: float, strategy: str = "PACK") -> Placement:
    """Reserve slots with Ray's `strategy`; raise ConfigError if they are not free in time."""
    from ray.util.placement_group import placement_group, placement_group_table

    bundle = {SLOT: 1.0, **({"GPU": 1.0} if gpus else {})}
    group = placement_group([bundle] * num_slots, strategy=strategy)
    if not group.wait(deadline_seconds):
        raise ConfigError(
            f"{num_slots} slots were not free within {deadline_seconds:g} s; check if another run uses this "
            "cluster"
        )
    numbers = _node_numbers()
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    nodes = {int(bundle): numbers[node] for bundle, node in node_ids.items()}
    slots = order_slots(nodes, _gpus(group, num_slots, deadline_seconds) if gpus else ())
    return Placement(group, slots, {node: numbers[node] for node in node_ids.values()})


def order_slots(nodes: Mapping[int, int], gpus: Sequence[str]) -> tuple[Slot, ...]:
    """Return the slots in rank order; GPU numbers are sorted as numbers, and come before UUIDs.

    `nodes`: bundle -> node number; `gpus`: GPU of each bundle, or empty.

    >>> [slot.gpu for slot in ordered({0: 0, 1: 0, 2: 0}, ("10", "GPU-a1", "9"))]
    ['9', '10', 'GPU-a1']
    """
    slots = [Slot(bundle, node, gpus[bundle] if gpus else "") for bundle, node in nodes.items()]
    return tuple(sorted(slots, key=lambda slot: (slot.node, *_number(slot.gpu), slot.bundle)))


def _number(gpu: str) -> tuple[bool, int, str]:
    return not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu


def _gpus(group: Any, num_slots: int, deadline_seconds: float) -> list[str]:
    """Return the GPU of each bundle, as Ray assigns it to a task inside."""
    import ray

    task: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_own_gpu)
    calls = [task.options(scheduling_strategy=_on_bundle(group, i)).remote() for i in range(num_slots)]
    _, late = ray.wait(calls, num_returns=num_slots, timeout=deadline_seconds)
    if late:
        raise ConfigError(
            f"{len(late)} of {num_slots} slots did not report their GPU within {deadline_seconds:g} s"
        )
    return ray.get(calls)


def _own_gpu() -> str:
    import ray

    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(gpu)


def _on_bundle(group: Any, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _node_numbers() -> dict[str, int]:
    """Return Ray's node id -> launcher's number, for each node with slots."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)]
    return {node["NodeID"]: _node_number(node, len(nodes)) for node in nodes}


def _node_number(node: dict[str, Any], num_nodes: int) -> int:
    label = (node.get("Labels") or {}).get(NODE_LABEL)
    if label is not None:
        return int(label)
    if num_nodes == 1:
        return 0
    raise ConfigError(
        f"the Ray node {node['NodeID']} has no label {NODE_LABEL}; start each node with --labels "
        f"{NODE_LABEL}=<its number>"
    )
