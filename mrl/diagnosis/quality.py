"""Whether a run gets better: its validation against its best, and what the training reward did since then.

No rule fires on a training signal alone, because falling entropy, groups without a gradient and large gradients are what
a run looks like that has learned its task.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.diagnosis.metric_arrays import CERTAIN, RECENT, forward_fill, noise, recent
from mrl.observe.metric_curves import Curves

VALIDATION = "val/reward"
FALL = 0.05
"""Fall of the validation below its best that counts, where its standard error is not larger."""
PROMPTS = 256.0
"""Validation prompts of a run that does not say how many it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Arrays are [S], a value a row."""

    now: np.ndarray
    """The last validation."""
    best: np.ndarray
    best_row: np.ndarray
    """The row of the best."""
    checks_since: np.ndarray
    """Validations after the best."""
    fell: np.ndarray
    """Whether the last two validations are below the best by more than chance."""
    reward_change: np.ndarray
    """Recent training reward less that around the best validation."""
    reward_error: float
    """The standard error of that change."""

    @property
    def reward_rose(self) -> np.ndarray:
        return self.reward_change > CERTAIN * self.reward_error

    @property
    def reward_fell(self) -> np.ndarray:
        return self.reward_change < -CERTAIN * self.reward_error

    @property
    def stalled(self) -> np.ndarray:
        """Whether the best is older than three validations."""
        return self.checks_since > 3


def quality(curves: Curves) -> Quality | None:
    """None without validation."""
    if not curves.has(VALIDATION):
        return None
    readings, rewards = curves.of(VALIDATION), curves.of("reward/mean")
    best_row = _best_rows(readings)
    now, best = forward_fill(readings), readings[best_row]
    checks = np.cumsum(np.isfinite(readings))
    prompts = np.maximum(np.nan_to_num(forward_fill(curves.of("val/prompts")), nan=PROMPTS), 1.0)
    errors = np.sqrt((_variance(now) + _variance(best)) / prompts)
    below = best - now > np.maximum(FALL, CERTAIN * errors)
    near_best = _around(rewards, best_row)
    return Quality(
        now=now,
        best=best,
        best_row=best_row,
        checks_since=checks - checks[best_row],
        fell=below & _at_last_check(below, checks),
        reward_change=recent(rewards) - near_best,
        reward_error=noise(rewards) * float(np.sqrt(1 / 3 + 1 / RECENT)),
    )


def _best_rows(readings: np.ndarray) -> np.ndarray:
    """[S] int64: the first row of the best reading so far; 0 before there is one."""
    rows, best = np.zeros(len(readings), np.int64), 0
    for row, reading in enumerate(readings):
        if np.isfinite(reading) and not reading <= readings[best]:
            best = row
        rows[row] = best
    return rows


def _at_last_check(below: np.ndarray, checks: np.ndarray) -> np.ndarray:
    """[S] what held after the validation before the last one; False where there was none."""
    first = np.searchsorted(checks, checks - 1)
    return below[first] & (checks > 1)


def _variance(share: np.ndarray) -> np.ndarray:
    return np.clip(share, 0, 1) * (1 - np.clip(share, 0, 1))


def _around(rewards: np.ndarray, best_row: np.ndarray) -> np.ndarray:
    """[S] the mean reward of the best row, the one before, and the one after, whose samples the validated weights drew."""
    last = np.minimum(best_row + 1, np.arange(len(rewards)))
    return recent(rewards, 3)[last]
