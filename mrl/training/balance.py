"""Assign a batch's samples to data-parallel ranks and micro-batches so that ranks wait little. Pure.

Ranks that share experts meet in every layer of every micro-batch, so a pass takes the sum over micro-batches
of the slowest rank's time; equal sums over ranks are not enough. Therefore all ranks' micro-batches are
filled evenly by cost, the costliest sample first into the cheapest (LPT: Graham 1969, SIAM J. Appl. Math.
17). Micro-batches of similar cost then run side by side: pairing them in order of cost gives the smallest sum
of maxima.

A group whose samples share a prefix is computed in one piece, or in a few where whole groups are too coarse
for the ranks: its prefix then costs once per piece.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np

from mrl.models.facts import ModelSize
from mrl.models.kernels.zigzag import padded
from mrl.samples import TrainBatch
from mrl.training.prefixes import fitting_parts, may_save_enough, saves_enough

EVEN = 1.05
"""An assignment this close to the mean of the ranks is even enough."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleCost:
    """Operations of a pass over one sample: per token, and per pair of tokens in attention."""

    token: float
    pair: float

    @classmethod
    def of_model(cls, facts: ModelSize) -> SampleCost:
        """Use the model's own counts (Facts.forward_flops)."""
        return cls(token=facts.forward_flops(1, 0), pair=facts.forward_flops(0, 1))

    def __call__(self, lengths: np.ndarray, before: np.ndarray | float = 0.0) -> np.ndarray:
        """Return [B] costs of segments with [B] tokens and causal attention, also to the tokens `before`.

        >>> SampleCost(token=10, pair=2)(np.array([1, 10])).tolist() [11.0, 200.0]
        """
        return lengths * (self.token + self.pair * (before + 0.5 * lengths))


@dataclasses.dataclass(frozen=True, slots=True)
class SampleBalancer:
    """Assigns the batches of a run to ranks."""

    ranks: int
    """Data-parallel ranks."""
    max_tokens: int
    """Tokens per micro-batch; a longer sample gets its own."""
    cost: SampleCost
    cp: int = 1
    """Context-parallel size: samples are padded to chunks."""
    multiple: int = 1
    """The number of micro-batches is a multiple of this."""
    shares_prefixes: bool = False
    """Model and layout compute shared prefixes once."""

    def __call__(self, batch: TrainBatch) -> tuple[TrainBatch, list[np.ndarray]]:
        """Return the batch with each sample's micro-batch, and the sample positions of each rank, in order.

        Every sample is in exactly one rank's part; parts may be empty. Deterministic. Prefixes are shared if
        that saves MIN_PREFIX_SAVING of the batch's tokens, by parts of groups that leave the ranks balanced.
        """
        assert not batch.whole_groups, "whole groups are assigned by their maker"
        lengths = padded(batch.lengths(), self.cp).astype(np.int64)
        samples = [np.array([sample]) for sample in range(len(lengths))]
        alone = _Assignment.of(self, samples, lengths, self.cost(lengths))
        chosen = self._sharing(batch, alone) or alone
        parts = [np.flatnonzero(chosen.rank == number) for number in range(self.ranks)]
        shares = chosen is not alone
        return dataclasses.replace(batch, microbatches=chosen.microbatch, shares_prefixes=shares), parts

    def _sharing(self, batch: TrainBatch, alone: _Assignment) -> _Assignment | None:
        """Return the shortest assignment of groups in one part, in two, in four and so on; None without
        sharing."""
        if not self.shares_prefixes or not batch.num_samples or not may_save_enough(batch):
            return None
        best, pieces = None, 1
        largest = max(len(group) for group in batch.groups())
        while pieces < largest:
            units, tokens, costs = self._units(batch, pieces)
            if pieces == 1 and not saves_enough(tokens.sum(), batch):
                return None
            shared = _Assignment.of(self, units, tokens, costs)
            if best is None or shared.height < best.height:
                best = shared
            if best.height <= EVEN * costs.sum() / self.ranks:
                break
            pieces *= 2
        return best if best is not None and best.height < alone.height else None

    def _units(self, batch: TrainBatch, pieces: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Return parts of groups, of which each is computed in one micro-batch: samples, tokens, cost."""
        plain = dataclasses.replace(batch, routes=None)  # packing.py splits parts that routes make too large
        parts = [
            fitting
            for group in batch.groups()
            for piece in np.array_split(group, min(pieces, len(group)))
            for fitting in fitting_parts(plain, piece, max_tokens=self.max_tokens)
        ]
        units, trees = zip(*parts, strict=True)
        tokens = np.array([tree.num_tokens for tree in trees])
        costs = np.array([self.cost(tree.lengths, tree.offsets()).sum() for tree in trees])
        return list(units), tokens, costs


@dataclasses.dataclass(frozen=True, slots=True)
class _Assignment:
    """Where the samples of a batch are computed."""

    rank: np.ndarray
    """[B] data-parallel rank of each sample."""
    microbatch: np.ndarray
    """[B] micro-batch of each sample."""
    height: float
    """Sum over micro-batches of the slowest rank's cost."""

    @classmethod
    def of(
        cls, balancer: SampleBalancer, units: list[np.ndarray], tokens: np.ndarray, costs: np.ndarray
    ) -> _Assignment:
        """Assign units of samples, which stay together; `tokens` and `costs` are theirs."""
        rank, microbatch = assign_samples(
            tokens, costs, ranks=balancer.ranks, max_tokens=balancer.max_tokens, multiple=balancer.multiple
        )
        if not len(units):
            return cls(rank, microbatch, 0.0)
        loads = np.zeros((int(microbatch.max()) + 1, balancer.ranks))
        np.add.at(loads, (microbatch, rank), costs)
        order = np.argsort(np.concatenate(units))
        sizes = [len(unit) for unit in units]
        rank, microbatch = (np.repeat(values, sizes)[order] for values in (rank, microbatch))
        return cls(rank, microbatch, float(loads.max(axis=1).sum()))


def assign_samples(
    lengths: np.ndarray, costs: np.ndarray, *, ranks: int, max_tokens: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return [B] rank and [B] micro-batch for [B] tokens and costs, in the fewest micro-batches that fit.

    >>> [x.tolist() for x in deal(np.array([9, 5, 4, 4]), np.array([9, 5, 4, 4]), ranks=2, max_tokens=9)] [[0,
    1, 1, 0], [0, 0, 0, 1]]
    """
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    for count in itertools.count(_fewest(lengths, ranks, max_tokens, multiple), multiple):
        places = _fill(lengths, costs, count, ranks, max_tokens)
        if places is not None:
            return _even(places, costs, ranks, count)
    raise AssertionError("one micro-batch per sample always suffices")


def _fewest(lengths: np.ndarray, ranks: int, max_tokens: int, multiple: int) -> int:
    """Return a lower bound on micro-batches, by all tokens, and by samples of which no two fit together."""
    alone = int((lengths > max_tokens / 2).sum())
    counted = int(np.minimum(lengths, max_tokens).sum())
    needed = max(1, -(-counted // (ranks * max_tokens)), -(-alone // ranks))
    return -(-needed // multiple) * multiple


def _fill(
    lengths: np.ndarray, costs: np.ndarray, count: int, ranks: int, max_tokens: int
) -> np.ndarray | None:
    """Return each sample's [B] place (micro-batch x ranks + rank); None if `count` micro-batches are too few.

    The costliest goes first, to the place with room that is furthest below its micro-batch's height: it
    lengthens the pass least. Heap entries whose remainder changed are dropped. Entries without room for the
    sample move to the heap of tight places, until a sample fits.
    """
    remaining, room = [0.0] * (count * ranks), [max(max_tokens, int(lengths.max()))] * (count * ranks)
    chosen = np.zeros(len(lengths), np.int64)
    roomy, tight = [(-0.0, place) for place in range(count * ranks)], list[tuple[int, int]]()
    for sample in np.argsort(-costs, kind="stable").tolist():
        size, cost = int(lengths[sample]), float(costs[sample])
        while tight and -tight[0][0] >= size:
            place = heapq.heappop(tight)[1]
            heapq.heappush(roomy, (-remaining[place], place))
        while roomy and (-roomy[0][0] != remaining[roomy[0][1]] or room[roomy[0][1]] < size):
            key, place = heapq.heappop(roomy)
            if -key == remaining[place]:
                heapq.heappush(tight, (-room[place], place))
        if not roomy:
            return None
        place = heapq.heappop(roomy)[1]
        chosen[sample] = place
        room[place] = min(room[place], max_tokens) - size
        first, raised = place - place % ranks, cost - remaining[place]
        if raised > 0.0:
            for other in range(first, first + ranks):
                remaining[other] += raised
                if other != place:
                    heapq.heappush(roomy, (-remaining[other], other))
        remaining[place] -= cost
        heapq.heappush(roomy, (-remaining[place], place))
    return chosen


def _even(places: np.ndarray, costs: np.ndarray, ranks: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [B] rank and [B] micro-batch of places: the costliest parts go to the least loaded ranks."""
    loads = np.bincount(places, weights=costs, minlength=ranks * count).reshape(count, ranks)
    rank_of, sums = np.zeros((count, ranks), np.int64), np.zeros(ranks)
    for microbatch, load in enumerate(loads):
        order = np.argsort(-load, kind="stable")
        rank_of[microbatch, order] = np.argsort(sums, kind="stable")
        sums[rank_of[microbatch]] += load
    return rank_of.ravel()[places], places // ranks
