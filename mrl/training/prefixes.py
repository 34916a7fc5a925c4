"""Find the prefixes that sequences of a group share, so that a pass computes them once. Pure: numpy alone.

A group's samples begin with the same prompt; sequences of one episode begin with the same turns. A token's
hidden state depends only on the tokens before it, so log-probs and gradients equal those of whole sequences.
With replayed routes it also depends on the experts that these tokens visit: they must be the same too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from mrl.config.sections.training import MIN_PREFIX_SAVING, TrainingSection
from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.family import HfConfig
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.samples import TrainBatch

MIN_SHARED_TOKENS = 16
"""Repeat fewer common tokens: each segment is a row of its own in the attention's buckets."""


def shares_prefixes(training: TrainingSection, hf: HfConfig) -> bool:
    """Return True if passes over a model with config.json `hf` may share prefixes. Raise ConfigError if the
    setting asks for it and the model cannot."""
    delta_nets = family_of(hf).num_delta_nets(hf)
    if training.share_prefixes is True and delta_nets:
        raise ConfigError(
            "training.share_prefixes = true: the model has delta nets, whose state cannot branch yet; set it "
            "to auto"
        )
    return training.may_share_prefixes(delta_nets=delta_nets)


def with_shared_prefixes(batch: TrainBatch) -> TrainBatch:
    """Return the batch, sharing prefixes if that saves MIN_PREFIX_SAVING of its tokens."""
    count = sum(prefix_tree(batch, group)[0].num_tokens for group in batch.groups())
    return dataclasses.replace(batch, shares_prefixes=saves_enough(count, batch))


def may_save_enough(batch: TrainBatch) -> bool:
    """Estimate saves_enough() from the first two samples of each group, 50 times as fast as from all."""
    saved = 0
    for group in batch.groups():
        if len(group) > 1:
            first, second = (batch.tokens[span] for span in batch.spans(group[:2]))
            saved += _common_rows(first, second) * (len(group) - 1)
    return saves_enough(batch.num_tokens - saved, batch)


def saves_enough(num_computed: int, batch: TrainBatch) -> bool:
    """Return True if computing so many tokens instead of all saves MIN_PREFIX_SAVING."""
    return num_computed <= (1 - MIN_PREFIX_SAVING) * batch.num_tokens


def prefix_tree(batch: TrainBatch, samples: np.ndarray) -> tuple[SegmentTree, np.ndarray]:
    """Return the tree of the given samples [S], and the place [n] in its packed tokens of each of their
    tokens, sample by sample. Samples share prefixes inside their group."""
    tree = _TreeBuilder()
    sequences = [batch.tokens[span] for span in batch.spans(samples)]
    experts = None if batch.routes is None else [_experts(batch, sample) for sample in samples.tolist()]
    groups: dict[int, list[int]] = {}
    for position, group in enumerate(batch.group_ids[samples].tolist()):
        groups.setdefault(group, []).append(position)
    for members in groups.values():
        tree.add_group(members, sequences, experts)
    places = [tree.places[position] for position in range(len(sequences))]
    return tree.finished(), np.concatenate(places) if places else np.zeros(0, np.int64)


def fitting_parts(
    batch: TrainBatch, samples: np.ndarray, *, max_tokens: int
) -> list[tuple[np.ndarray, SegmentTree]]:
    """Halve the given samples until each part has at most max_tokens, or is one sample; return the parts with
    their trees."""
    parts, pending = [], [samples]
    while pending:
        part = pending.pop()
        tree, _ = prefix_tree(batch, part)
        if tree.num_tokens <= max_tokens or len(part) == 1:
            parts.append((part, tree))
        else:
            pending += np.array_split(part, 2)[::-1]
    return parts


class _TreeBuilder:
    """Segments so far, and the places of the sequences' tokens in them."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._parents: list[int] = []
        self._num_tokens = 0
        self.places: dict[int, np.ndarray] = {}
        """Places of each sequence's tokens, by its position."""

    def finished(self) -> SegmentTree:
        return SegmentTree(np.array(self._lengths, np.int64), np.array(self._parents, np.int64))

    def add_group(
        self, members: Sequence[int], sequences: Sequence[np.ndarray], experts: Sequence[np.ndarray] | None
    ) -> None:
        """Add the sequences of a group, whose positions are `members`.

        In lexicographic order, the tokens that a run of sequences shares are the fewest that two neighbours
        in it share.
        """
        # of big-endian bytes, which compare like the tokens
        ordered = sorted(members, key=lambda member: sequences[member].byteswap().tobytes())
        common = [_num_common(sequences, experts, *pair) for pair in itertools.pairwise(ordered)]
        pending = [(0, len(ordered), -1, np.zeros(0, np.int64))]
        while pending:
            first, end, parent, before = pending.pop()
            if end - first == 1:
                _, self.places[ordered[first]] = self._extended(
                    parent, before, len(sequences[ordered[first]])
                )
                continue
            shared = min(common[first : end - 1])
            if shared - len(before) >= MIN_SHARED_TOKENS:
                parent, before = self._extended(parent, before, shared)
            branches = [
                first,
                *(n + 1 for n in range(first, end - 1) if common[n] - len(before) < MIN_SHARED_TOKENS),
                end,
            ]
            pending += [(*bounds, parent, before) for bounds in itertools.pairwise(branches)]

    def _extended(self, parent: int, before: np.ndarray, length: int) -> tuple[int, np.ndarray]:
        """Continue the path to `parent`, whose tokens have places `before`, to `length` tokens by a segment;
        return the segment and all places."""
        size = length - len(before)
        if not size:
            return parent, before
        places = np.append(before, np.arange(self._num_tokens, self._num_tokens + size))
        self._lengths.append(size)
        self._parents.append(parent)
        self._num_tokens += size
        return len(self._lengths) - 1, places


def _experts(batch: TrainBatch, sample: int) -> np.ndarray:
    """Return the experts [tokens - 1, all layers x k] that a sample's positions visit."""
    assert batch.routes is not None
    rows = [piece.block[piece.start : piece.stop] for piece in batch.routes[sample].pieces]
    return np.concatenate([block.reshape(len(block), -1) for block in rows or [np.zeros((0, 1, 1))]])


def _num_common(
    sequences: Sequence[np.ndarray], experts: Sequence[np.ndarray] | None, first: int, second: int
) -> int:
    """Return how many tokens two sequences share from their start, with the experts that they visit."""
    shared = _common_rows(sequences[first], sequences[second])
    if experts is None or not shared:
        return shared
    # a sequence's last token has no row; its state predicts nothing, but its place may be another's
    rows = _common_rows(experts[first][:shared], experts[second][:shared])
    return shared if rows >= min(shared, len(experts[first]), len(experts[second])) else rows


def _common_rows(first: np.ndarray, second: np.ndarray) -> int:
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    return int(differs.argmax()) if differs.any() else size
