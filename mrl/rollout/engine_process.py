"""Processes of one engine: one per dp rank, each with its own requests, scheduler and KV cache.

If a dp rank's tp slots are on several nodes, each further node has a process without a scheduler.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mrl.config.root import Config


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProcess:
    """One process of an engine, with an equal share of the rollout.tp slots of its dp rank."""

    engine: int = 0
    dp_rank: int = 0
    dp: int = 1
    node: int = 0
    """Index among the nodes of its dp rank; node 0's process has the scheduler."""
    nodes: int = 1

    @classmethod
    def of(cls, number: int, *, dp: int, nodes: int = 1) -> EngineProcess:
        """Return process `number` of a run in slot order, not counting those of further nodes.

        >>> Part.of(5, dp=2).name
        'engine 2, dp rank 1'
        """
        engine, dp_rank = divmod(number, dp)
        return cls(engine, dp_rank, dp, nodes=nodes)

    @property
    def is_whole(self) -> bool:
        """True if the engine has no other process."""
        return self.dp == self.nodes == 1

    @property
    def name(self) -> str:
        """Name for messages.

        >>> [part.name for part in Part(1, nodes=3).further()]
        ['engine 1, node 1', 'engine 1, node 2']
        """
        rank = f", dp rank {self.dp_rank}" if self.dp > 1 else ""
        return f"engine {self.engine}{rank}" + (f", node {self.node}" if self.node else "")

    def other_nodes(self) -> list[EngineProcess]:
        """Return the processes on the other nodes of its dp rank."""
        return [dataclasses.replace(self, node=node) for node in range(1, self.nodes)]

    def slots(self, slots: Sequence[int], *, tp: int) -> Sequence[int]:
        """Return this process's part of the `slots` of all engines, in their order.

        >>> Part(engine=1, node=1, nodes=2).slots(range(8), tp=4)
        range(6, 8)
        """
        share = tp // self.nodes
        first = (self.engine * self.dp + self.dp_rank) * tp + self.node * share
        return slots[first : first + share]


def slots_per_node(config: Config, nodes: Sequence[int]) -> list[list[int]]:
    """Return each dp rank's number of slots per node. `nodes`: each slot's node, in consecutive runs."""
    engine_nodes, tp = [nodes[slot] for slot in config.engine_slots], config.rollout.tp
    ranks = (engine_nodes[first : first + tp] for first in range(0, len(engine_nodes), tp))
    return [[len(list(same)) for _, same in itertools.groupby(rank)] for rank in ranks]


def schedulers(config: Config, nodes: Sequence[int]) -> list[EngineProcess]:
    """Return each dp rank's process with a scheduler, in slot order; `nodes` as above, in equal shares."""
    shares = slots_per_node(config, nodes)
    return [EngineProcess.of(n, dp=config.rollout.dp, nodes=len(share)) for n, share in enumerate(shares)]
