"""Slots in a stable order: node by node (number given by the launcher), then slot by slot.

Ray promises no order of bundles across nodes, so it is read back and sorted. Node numbers come from the label `mrl-node`
that the launcher gives each node; never from hostnames or addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mrl.errors import ConfigError
from mrl.launch.cluster.cluster import SLOT
from mrl.launch.cluster.ray_node import NODE_LABEL


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One bundle of the placement group."""

    bundle: int
    node: int
    """The launcher's number of the node."""
    node_id: str
    """Ray's name of the node."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A placement group and its slots in rank order."""

    group: Any
    slots: tuple[Slot, ...]

    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        """Scheduling strategies that put an actor on the slot of each rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [self.slots[rank].bundle for rank in ranks]
        return [PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=b) for b in bundles]

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def place(num_slots: int, *, gpus: bool, deadline_seconds: float) -> Placement:
    """Reserves the slots; raises ConfigError when the cluster cannot give them in time."""
    from ray.util.placement_group import placement_group

    bundle = {SLOT: 1.0, **({"GPU": 1.0} if gpus else {})}
    group = placement_group([bundle] * num_slots, strategy="PACK")
    if not group.wait(deadline_seconds):
        raise ConfigError(
            f"{num_slots} slots were not free within {deadline_seconds:g} s; is another run on this cluster?"
        )
    return Placement(group, tuple(_ordered(group)))


def node_strategies() -> list[Any]:
    """Scheduling strategies that put one actor on each node of the cluster, in the nodes' order."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    numbers = _node_numbers()
    return [NodeAffinitySchedulingStrategy(n, soft=False) for n in sorted(numbers, key=lambda n: numbers[n])]


def _ordered(group: Any) -> list[Slot]:
    from ray.util.placement_group import placement_group_table

    numbers = _node_numbers()
    where = placement_group_table(group)["bundles_to_node_id"]
    slots = [Slot(int(bundle), numbers[node], node) for bundle, node in where.items()]
    return sorted(slots, key=lambda slot: (slot.node, slot.bundle))


def _node_numbers() -> dict[str, int]:
    """The launcher's number of each node that has slots, by Ray's name of the node."""
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
        f"the Ray node {node['NodeID']} has no label {NODE_LABEL}; start each node with --labels {NODE_LABEL}=<its number>"
    )
