"""Nearest trainer ranks of a set, for all engine ranks at once. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.resharding.planner.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """For each engine rank, the nearest ranks of a set, in rising order: `ranks[first : first + count]`."""

    ranks: np.ndarray
    positions: np.ndarray
    """Positions of the entries of `ranks` in the given set."""
    first: np.ndarray
    count: np.ndarray
    distance: np.ndarray
    """Distance as in `Topology.distance`."""
    ids: np.ndarray
    """By choice: equal ids mean equal ranks, whatever the given set."""
    of_engine: np.ndarray
    """By engine rank: its choice."""


class NearestRanks:
    """Finds nearest ranks in one topology; caches by the given set."""

    def __init__(self, topology: Topology) -> None:
        self._trainer_slots = np.array(topology.trainer_slots, int)
        self._engine_slots = np.array(topology.engine_slots, int)
        slots = np.arange(topology.num_slots)
        self.pools = not set(topology.trainer_slots) & set(topology.engine_slots)
        """True if no slot has ranks of both sides; then all ranks of other nodes are equally near."""
        rails = np.zeros_like(slots) if self.pools else np.array(topology.rails)
        self._places = (slots, np.array(topology.nodes), rails, np.zeros_like(slots))
        """By distance: a property that slots at most this far apart share."""
        trainers = np.full(topology.num_slots, -1)
        trainers[self._trainer_slots] = np.arange(len(self._trainer_slots))
        self.trainer_on_slot = trainers[self._engine_slots]
        """By engine rank: the trainer rank on its own slot; -1 if there is none."""
        self._known: dict[tuple[int, ...], Nearest] = {}
        self._ids: dict[bytes, int] = {}

    def of(self, trainer_ranks: tuple[int, ...]) -> Nearest:
        """Return the nearest of `trainer_ranks`, which are in rising order."""
        if trainer_ranks not in self._known:
            self._known[trainer_ranks] = self._find(np.array(trainer_ranks, np.int32))
        return self._known[trainer_ranks]

    def _find(self, given: np.ndarray) -> Nearest:
        slots = self._trainer_slots[given]
        of_engine = np.full(len(self._engine_slots), -1, np.int32)
        positions, counts, distances, made = [], [], [], 0
        for distance, place in enumerate(self._places):
            values, count = np.unique(place[slots], return_counts=True)
            open_ranks = np.flatnonzero(of_engine < 0)
            sought = place[self._engine_slots[open_ranks]]
            choice = np.minimum(np.searchsorted(values, sought), len(values) - 1)
            met = values[choice] == sought
            of_engine[open_ranks[met]] = made + choice[met]
            positions.append(np.argsort(place[slots], kind="stable"))
            counts.append(count)
            distances.append(np.full(len(values), distance, np.int8))
            made += len(values)
        listed, sizes = np.concatenate(positions), np.concatenate(counts)
        ranks, ends = given[listed], np.cumsum(sizes)
        ids = [self._ids.setdefault(r.tobytes(), len(self._ids)) for r in np.split(ranks, ends[:-1])]
        return Nearest(
            ranks=ranks,
            positions=listed,
            first=(ends - sizes).astype(np.int32),
            count=sizes.astype(np.int32),
            distance=np.concatenate(distances),
            ids=np.array(ids, np.int32),
            of_engine=of_engine,
        )


def times_before(numbers: np.ndarray) -> np.ndarray:
    """Return how often each entry's number came before it.

    >>> times_before(np.array([7, 7, 3, 7])).tolist()
    [0, 1, 0, 2]
    """
    order = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    lengths = np.diff(begins, append=len(numbers))
    result = np.empty(len(numbers), np.int32)
    result[order] = np.arange(len(numbers)) - np.repeat(begins, lengths)
    return result
