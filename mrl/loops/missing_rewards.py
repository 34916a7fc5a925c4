"""Whether samples without a reward are unlike the others: leaving them out is only fair where failing has nothing to
do with the response. Long ones time out first, and a policy then learns from short ones alone."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mrl.samples import Group, Sample, Status

STEPS = 8
"""Of the newest steps, together."""
LENGTH_RATIOS = (2 / 3, 3 / 2)
MOST_LIKELY = 0.001
"""A difference that chance makes as often is none."""
KINDS = ("status", "domain", "tag")
_Z = 3.2905
"""Of a two-sided probability of `MOST_LIKELY`."""


class _Step(NamedTuple):
    """What is kept of a step's samples, whose tokens are not."""

    missing: np.ndarray
    """[S] bool: it has no reward."""
    lengths: np.ndarray
    """[S] int64."""
    kinds: tuple[list[str], ...]
    """[S] each, by place in KINDS."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Step:
        return cls(
            np.array([not s.has_reward for s in samples], bool),
            np.array([s.num_policy_tokens for s in samples], np.int64),
            ([s.status.value for s in samples], [s.domain for s in samples], [s.tag for s in samples]),
        )


class MissingRewards:
    """The newest steps' samples that had a response, with and without a reward."""

    def __init__(self) -> None:
        self._steps: collections.deque[_Step] = collections.deque(maxlen=STEPS)

    def look(self, groups: Sequence[Group]) -> tuple[dict[str, float], list[str]]:
        """Metrics after one more step, and in words what is unlike; none of either without such samples."""
        ended = (Status.FINISHED, Status.TRUNCATED)
        self._steps.append(_Step.of([s for g in groups for s in g.samples if s.status in ended]))
        missing = np.concatenate([step.missing for step in self._steps])
        if not missing.any() or missing.all():
            return {}, []
        lengths = np.concatenate([step.lengths for step in self._steps]).astype(np.float64)
        ratio = float(lengths[missing].mean() / max(lengths[~missing].mean(), 1e-9))
        found = [f"responses {ratio:.2f} times as long"] if _differ(lengths, missing, ratio) else []
        found += _kinds(self._steps, missing)
        return {"reward/no_reward_length_ratio": ratio, "reward/no_reward_unlike": float(bool(found))}, found


def _differ(lengths: np.ndarray, missing: np.ndarray, ratio: float) -> bool:
    """By the ranks too (Mann and Whitney, 1947), with mean ranks for equal lengths."""
    if LENGTH_RATIOS[0] <= ratio <= LENGTH_RATIOS[1]:
        return False
    _, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    few, many, total = int(missing.sum()), int((~missing).sum()), len(lengths)
    ties = float((counts**3 - counts).sum()) / (total * (total - 1))
    spread = math.sqrt(few * many / 12 * max(total + 1 - ties, 1e-9))
    return abs(float(ranks[missing].sum()) - few * (total + 1) / 2) > _Z * spread


def _kinds(steps: Iterable[_Step], missing: np.ndarray) -> Iterator[str]:
    """Statuses, domains and tags that are too frequent among those without a reward."""
    for place, what in enumerate(KINDS):
        names = [name for step in steps for name in step.kinds[place]]
        for name in sorted(set(names)):
            has = np.array([n == name for n in names], bool)
            chance = _at_least(int((has & missing).sum()), int(has.sum()), int(missing.sum()), len(names))
            if chance < MOST_LIKELY:
                among = f"{(has & missing).sum()} of {missing.sum()}, {has.sum()} of {len(names)} of all"
                yield f"{what} {name or '-'} in {among}"


def _at_least(count: int, of_kind: int, drawn: int, total: int) -> float:
    """Probability that among `drawn` of `total` at least `count` are of a kind that `of_kind` are of.

    >>> round(_at_least(2, 2, 2, 4), 4)
    0.1667
    """
    most = min(of_kind, drawn)
    return sum(
        math.exp(
            _log_choose(of_kind, k) + _log_choose(total - of_kind, drawn - k) - _log_choose(total, drawn)
        )
        for k in range(max(count, drawn - (total - of_kind)), most + 1)
    )


def _log_choose(total: int, drawn: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(drawn + 1) - math.lgamma(total - drawn + 1)
