"""Places of ranks: slots (one GPU or CPU share each), nodes and rails; never detected here. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Slots and their ranks: at most one trainer rank and one engine rank share a slot and its memory."""

    nodes: tuple[int, ...]
    """Node of each slot."""
    rails: tuple[int, ...]
    """Rail of each slot: slots of one rail reach other nodes without crossing the switches' upper tier."""
    trainer_slots: tuple[int, ...]
    """Slot of each trainer rank."""
    engine_slots: tuple[int, ...]
    """Slot of each engine rank."""

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.rails):
            raise ConfigError(f"{len(self.nodes)} slots have a node but {len(self.rails)} have a rail")
        for side, slots in (("trainer", self.trainer_slots), ("engine", self.engine_slots)):
            if len(set(slots)) != len(slots):
                raise ConfigError(
                    f"two {side} ranks share a slot: {slots}; a slot hosts at most one of each side"
                )
            if bad := [slot for slot in slots if not 0 <= slot < self.num_slots]:
                raise ConfigError(f"{side} slots {bad} are outside the {self.num_slots} slots")

    @property
    def num_slots(self) -> int:
        return len(self.nodes)

    @classmethod
    def shared_slots(cls, nodes: Sequence[int], *, num_trainers: int | None = None) -> Topology:
        """Put trainer rank r and engine rank r on slot r of node `nodes[r]`.

        With fewer trainers the last slots have only engine ranks. A slot's rail is its place in its node."""
        slots = tuple(range(len(nodes)))
        return cls(
            nodes=tuple(nodes), rails=_rails(nodes), trainer_slots=slots[:num_trainers], engine_slots=slots
        )

    @classmethod
    def shared(cls, num_slots: int, *, slots_per_node: int = 8, num_trainers: int | None = None) -> Topology:
        """Place ranks as `shared_slots` does, on nodes that are filled one after the other."""
        return cls.shared_slots(
            [slot // slots_per_node for slot in range(num_slots)], num_trainers=num_trainers
        )

    @classmethod
    def separate_slots(cls, nodes: Sequence[int]) -> Topology:
        """Put trainer rank r and engine rank r on node `nodes[r]`, on separate slots without shared
        memory."""
        ranks = tuple(range(len(nodes)))
        return cls(
            nodes=tuple(nodes) * 2,
            rails=_rails(nodes) * 2,
            trainer_slots=ranks,
            engine_slots=tuple(len(nodes) + rank for rank in ranks),
        )

    @classmethod
    def separate_pools(cls, nodes: Sequence[int], *, num_trainers: int) -> Topology:
        """Make two pools: trainer ranks on the first slots, engine ranks on the rest; slot s is on
        `nodes[s]`."""
        return cls(
            nodes=tuple(nodes),
            rails=_rails(nodes),
            trainer_slots=tuple(range(num_trainers)),
            engine_slots=tuple(range(num_trainers, len(nodes))),
        )

    def distance(self, trainer_slot: int, engine_slot: int) -> int:
        """Return 0 for the same slot, 1 for the same node, 2 for the same rail on another node, else 3."""
        if trainer_slot == engine_slot:
            return 0
        if self.nodes[trainer_slot] == self.nodes[engine_slot]:
            return 1
        return 2 if self.rails[trainer_slot] == self.rails[engine_slot] else 3


def _rails(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each slot among its node's slots.

    >>> _rails([0, 0, 1, 1, 1])
    (0, 1, 0, 1, 2)
    """
    seen: Counter[int] = Counter()
    rails = []
    for node in nodes:
        rails.append(seen[node])
        seen[node] += 1
    return tuple(rails)
