"""Slots in a stable order: node by node (number given by the launcher), then slot by slot.

Ray promises no order of bundles across nodes, so it is read back and sorted. Node numbers come from the label `mrl-node`
that the launcher gives each node; never from hostnames or addresses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launch.cluster import SLOT
from mrl.errors import ConfigError

NODE_LABEL = "mrl-node"


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

    def strategy(self, rank: int) -> Any:
        """Scheduling strategy that puts an actor on the slot of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.slots[rank].bundle
        )

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


def _ordered(group: Any) -> list[Slot]:
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    where = placement_group_table(group)["bundles_to_node_id"]
    slots = [Slot(int(b), _node_number(nodes[n], len(nodes)), n) for b, n in where.items()]
    return sorted(slots, key=lambda slot: (slot.node, slot.bundle))


def _node_number(node: dict[str, Any], num_nodes: int) -> int:
    label = (node.get("Labels") or {}).get(NODE_LABEL)
    if label is not None:
        return int(label)
    if num_nodes == 1:
        return 0
    raise ConfigError(
        f"the Ray node {node['NodeID']} has no label {NODE_LABEL}; start each node with --labels {NODE_LABEL}=<its number>"
    )
