"""Slots in a stable order: node by node (number given by the launcher), then GPU by GPU as Ray names them.

Ray promises no order of bundles, neither across nodes nor over a node's GPUs, so both are asked and sorted.
Node numbers come from the label `mrl-node` that the launcher gives each node; never from hostnames or
addresses. Where engines have slots of their own, the trainer's come first.
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
"""For an answer of Ray's head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One bundle of the placement group."""

    bundle: int
    node: int
    """The launcher's number of the node."""
    gpu: str = ""
    """The bundle's GPU as CUDA_VISIBLE_DEVICES names it (a number or a UUID); empty without GPUs."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A placement group and its slots in rank order."""

    group: Any
    slots: tuple[Slot, ...]
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The launcher's number of each node that the slots are on, by Ray's name of the node."""

    def topology(self, config: Config) -> Topology:
        """Where the plan of the weight sync finds both sides; `config` as it was placed."""
        if config.launch.engine_slots:
            return Topology.apart(self.nodes, num_trainers=config.training.layout.world_size)
        return Topology.on(self.nodes) if config.sync.transport == "auto" else Topology.beside(self.nodes)

    @property
    def gpus(self) -> bool:
        """Whether each slot is a GPU."""
        return all(slot.gpu for slot in self.slots)

    @property
    def nodes(self) -> list[int]:
        """The number of each slot's node."""
        return [slot.node for slot in self.slots]

    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        """Scheduling strategies that put an actor on the slot of each rank."""
        return [_on_bundle(self.group, self.slots[rank].bundle) for rank in ranks]

    def visible(self, ranks: Iterable[int]) -> dict[str, str]:
        """The variable that shows a process the GPUs of these ranks' slots, in their order, and no others;
        nothing without GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.slots[r].gpu for r in ranks)} if self.gpus else {}

    def lost_nodes(self) -> list[str]:
        """The run's nodes that Ray has given up, for people. None where its head does not answer, for which Ray waits until it ends this
        process: a thread of its own asks."""
        told: list[dict[str, Any]] = []

        def ask() -> None:
            import ray

            told.extend(ray.nodes())

        asking = threading.Thread(target=ask, name="lost nodes", daemon=True)
        asking.start()
        asking.join(HEAD_SECONDS)
        gone = {n["NodeID"]: n["NodeManagerAddress"] for n in [*told] if not n["Alive"]}
        return [
            f"node {number} ({gone[name]})" for name, number in sorted(self.numbers.items()) if name in gone
        ]

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def place(num_slots: int, *, gpus: bool, deadline_seconds: float, strategy: str = "PACK") -> Placement:
    """Reserves the slots; raises ConfigError when the cluster cannot give them in time. `strategy`: Ray's, of
    bundles to nodes."""
    from ray.util.placement_group import placement_group, placement_group_table

    bundle = {SLOT: 1.0, **({"GPU": 1.0} if gpus else {})}
    group = placement_group([bundle] * num_slots, strategy=strategy)
    if not group.wait(deadline_seconds):
        raise ConfigError(
            f"{num_slots} slots were not free within {deadline_seconds:g} s; is another run on this cluster?"
        )
    numbers = _node_numbers()
    where = placement_group_table(group)["bundles_to_node_id"]
    nodes = {int(bundle): numbers[node] for bundle, node in where.items()}
    slots = order_slots(nodes, _gpus(group, num_slots, deadline_seconds) if gpus else ())
    return Placement(group, slots, {node: numbers[node] for node in where.values()})


def order_slots(nodes: Mapping[int, int], gpus: Sequence[str]) -> tuple[Slot, ...]:
    """Slots in rank order. `nodes`: bundle -> number of its node; `gpus`: each bundle's GPU, or none. Numbers
    of GPUs count as numbers, and come before UUIDs.

    >>> [slot.gpu for slot in ordered({0: 0, 1: 0, 2: 0}, ("10", "GPU-a1", "9"))]
    ['9', '10', 'GPU-a1']
    """
    slots = [Slot(bundle, node, gpus[bundle] if gpus else "") for bundle, node in nodes.items()]
    return tuple(sorted(slots, key=lambda slot: (slot.node, *_number(slot.gpu), slot.bundle)))


def _number(gpu: str) -> tuple[bool, int, str]:
    return not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu


def _gpus(group: Any, num_slots: int, deadline_seconds: float) -> list[str]:
    """The GPU of each bundle, as a task inside it is told."""
    import ray

    ask: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_own_gpu)
    calls = [ask.options(scheduling_strategy=_on_bundle(group, each)).remote() for each in range(num_slots)]
    _, late = ray.wait(calls, num_returns=num_slots, timeout=deadline_seconds)
    if late:
        raise ConfigError(
            f"{len(late)} of {num_slots} slots did not tell their GPU within {deadline_seconds:g} s"
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
