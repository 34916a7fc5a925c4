"""The processes that one engine is made of: one, or with `rollout.dp` one for each dp rank, which has requests, a scheduler and
a KV cache of its own. Where a rank's tp slots lie on several nodes, each further node has a process without a scheduler, which
keeps that node's workers. Starts none of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mrl.config.root import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One process of an engine, which has an equal share of the rollout.tp slots of its dp rank."""

    engine: int = 0
    dp_rank: int = 0
    dp: int = 1
    node: int = 0
    """Among the nodes of its dp rank; the first one's process has the scheduler."""
    nodes: int = 1

    @classmethod
    def of(cls, number: int, *, dp: int, nodes: int = 1) -> Part:
        """The process `number` of a run, in the order of their slots, those of further nodes left out.

        >>> Part.of(5, dp=2).name
        'engine 2, dp rank 1'
        """
        engine, dp_rank = divmod(number, dp)
        return cls(engine, dp_rank, dp, nodes=nodes)

    @property
    def is_whole(self) -> bool:
        """Whether the engine has no other."""
        return self.dp == self.nodes == 1

    @property
    def name(self) -> str:
        """For people.

        >>> [part.name for part in Part(1, nodes=3).further()]
        ['engine 1, node 1', 'engine 1, node 2']
        """
        rank = f", dp rank {self.dp_rank}" if self.dp > 1 else ""
        return f"engine {self.engine}{rank}" + (f", node {self.node}" if self.node else "")

    def further(self) -> list[Part]:
        """Those of the other nodes of its dp rank."""
        return [dataclasses.replace(self, node=node) for node in range(1, self.nodes)]

    def slots(self, slots: Sequence[int], *, tp: int) -> Sequence[int]:
        """Its own of the `slots` of all engines, in their order.

        >>> Part(engine=1, node=1, nodes=2).slots(range(8), tp=4)
        range(6, 8)
        """
        share = tp // self.nodes
        first = (self.engine * self.dp + self.dp_rank) * tp + self.node * share
        return slots[first : first + share]


def on_each_node(config: Config, nodes: Sequence[int]) -> list[list[int]]:
    """How many of its tp slots each dp rank of a run has on each of its nodes, in slot order. `nodes`: the number of each slot's
    node; a node's slots come in a row."""
    own, tp = [nodes[slot] for slot in config.engine_slots], config.rollout.tp
    ranks = (own[first : first + tp] for first in range(0, len(own), tp))
    return [[len(list(same)) for _, same in itertools.groupby(rank)] for rank in ranks]


def schedulers(config: Config, nodes: Sequence[int]) -> list[Part]:
    """The processes of a run that have a scheduler, one for each dp rank, in slot order; `nodes` as above, in equal shares."""
    shares = on_each_node(config, nodes)
    return [Part.of(n, dp=config.rollout.dp, nodes=len(share)) for n, share in enumerate(shares)]
