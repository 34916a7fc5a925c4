"""Dynamic sampling's decision: which groups carry a signal, counted by decision.

Owns the tests on raw rewards. The loop owns resampling and its budget.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mrl.config.sections.shaping import FilterSection


class Decision(enum.Enum):
    """Outcome of a group's tests."""

    KEPT = "kept"
    """All tests passed, or the group's domain has a teacher."""
    ALL_CORRECT = "all_correct"
    """No spread, and every reward at least 1."""
    ALL_INCORRECT = "all_incorrect"
    """No spread, and every reward at most 0."""
    NO_SPREAD = "no_spread"
    """No spread, at a value in between."""
    MEAN_OUTSIDE = "mean_outside"
    """Spread, but the mean is outside the open interval."""
    NO_REWARD = "no_reward"
    """No sample has a reward."""


def decide(
    section: FilterSection, rewards: Sequence[np.ndarray], *, tolerance: float = 1e-6
) -> list[Decision]:
    """Decide each group from its raw rewards [G] (any sizes; NaN marks samples without a reward).

    Spread is max - min, compared with section.min_reward_range plus `tolerance` times the largest absolute
    reward, so that equal rewards with different rounding have none. The interval of the mean is open. A group
    of one has no spread.
    """
    return [_decide(section, np.asarray(group, dtype=np.float64), tolerance) for group in rewards]


def _decide(section: FilterSection, rewards: np.ndarray, tolerance: float) -> Decision:
    present = rewards[~np.isnan(rewards)]
    if not len(present):
        return Decision.NO_REWARD
    if not np.isfinite(present).all():
        raise ValueError(
            f"rewards: {present[~np.isfinite(present)][0]} in a group; "
            "rewards must be finite, or NaN if there is none"
        )
    low, high = present.min(), present.max()
    if section.min_reward_range is not None and high - low <= section.min_reward_range + tolerance * max(
        abs(low), abs(high)
    ):
        return (
            Decision.ALL_CORRECT if low >= 1 else Decision.ALL_INCORRECT if high <= 0 else Decision.NO_SPREAD
        )
    least, most = section.mean_range or (-np.inf, np.inf)
    return Decision.KEPT if least < present.mean() < most else Decision.MEAN_OUTSIDE


@dataclasses.dataclass
class DecisionCounts:
    """Groups by decision and domain over a step (or a run); every rate is groups over groups."""

    counts: Counter[tuple[str, Decision]] = dataclasses.field(default_factory=Counter)

    def add(self, decisions: Sequence[Decision], domains: Sequence[str] | None = None) -> None:
        """Count the decisions of one round; `domains` has one entry per group."""
        names = domains if domains is not None else ["all"] * len(decisions)
        self.counts.update(zip(names, decisions, strict=True))

    def metrics(self) -> dict[str, float]:
        """Return group/generated, kept, kept_frac and <decision>_frac; kept_frac per domain if several."""
        total = sum(self.counts.values())
        metrics = {"group/generated": float(total)}
        if not total:
            return metrics
        for decision in Decision:
            number = sum(n for (_, d), n in self.counts.items() if d is decision)
            metrics[f"group/{decision.value}_frac"] = number / total
        metrics["group/kept"] = metrics["group/kept_frac"] * total
        return metrics | self._by_domain()

    def _by_domain(self) -> dict[str, float]:
        domains = sorted({domain for domain, _ in self.counts})
        if len(domains) < 2:
            return {}
        totals = {name: sum(n for (d, _), n in self.counts.items() if d == name) for name in domains}
        return {
            f"group/kept_frac/{name}": self.counts[name, Decision.KEPT] / totals[name] for name in domains
        }
