"""Where ranks sit: slots (one GPU or CPU share each), nodes and rails. An argument of planning, never
discovered here. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """A slot hosts at most one trainer rank and at most one engine rank; both share the slot's memory."""

    nodes: tuple[int, ...]
    """Node of each slot."""
    rails: tuple[int, ...]
    """Rail of each slot: slots of one rail reach each other across nodes without crossing switches' upper
    tier."""
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
    def on(cls, nodes: Sequence[int], *, num_trainers: int | None = None) -> Topology:
        """Trainer rank r and engine rank r on slot r, which lies on node `nodes[r]`; with fewer trainers the
        last slots have an engine rank only. A slot's rail is its place among its node's slots."""
        slots = tuple(range(len(nodes)))
        return cls(
            nodes=tuple(nodes), rails=_rails(nodes), trainer_slots=slots[:num_trainers], engine_slots=slots
        )

    @classmethod
    def shared(cls, num_slots: int, *, slots_per_node: int = 8, num_trainers: int | None = None) -> Topology:
        """`on` nodes that are filled one after the other."""
        return cls.on([slot // slots_per_node for slot in range(num_slots)], num_trainers=num_trainers)

    @classmethod
    def beside(cls, nodes: Sequence[int]) -> Topology:
        """Trainer rank r and engine rank r both on node `nodes[r]`, but sharing no memory: a slot for
        each."""
        ranks = tuple(range(len(nodes)))
        return cls(
            nodes=tuple(nodes) * 2,
            rails=_rails(nodes) * 2,
            trainer_slots=ranks,
            engine_slots=tuple(len(nodes) + rank for rank in ranks),
        )

    @classmethod
    def apart(cls, nodes: Sequence[int], *, num_trainers: int) -> Topology:
        """Two pools: trainer ranks on the first slots, an engine rank on each of the others; slot s lies on
        node `nodes[s]`."""
        return cls(
            nodes=tuple(nodes),
            rails=_rails(nodes),
            trainer_slots=tuple(range(num_trainers)),
            engine_slots=tuple(range(num_trainers, len(nodes))),
        )

    def distance(self, trainer_slot: int, engine_slot: int) -> int:
        """0 same slot, 1 same node, 2 same rail in another node, 3 anything else."""
        if trainer_slot == engine_slot:
            return 0
        if self.nodes[trainer_slot] == self.nodes[engine_slot]:
            return 1
        return 2 if self.rails[trainer_slot] == self.rails[engine_slot] else 3


def _rails(nodes: Sequence[int]) -> tuple[int, ...]:
    """The place of each slot among the slots of its node.

    >>> _rails([0, 0, 1, 1, 1])
    (0, 1, 0, 1, 2)
    """
    seen: Counter[int] = Counter()
    rails = []
    for node in nodes:
        rails.append(seen[node])
        seen[node] += 1
    return tuple(rails)
