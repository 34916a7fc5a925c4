"""Measure whether a run improves: its validation against its best, and the change of the training reward
since then.

No rule fires on a training signal alone, because falling entropy, groups without a gradient and large
gradients also occur in a run that has learned its task.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.diagnosis.metric_arrays import CERTAIN, RECENT, forward_fill, noise, recent
from mrl.observe.metric_curves import Curves

VALIDATION = "val/reward"
FALL = 0.05
"""Fall of the validation below its best that counts, if its standard error is not larger."""
PROMPTS = 256.0
"""Validation prompts assumed if a run does not log them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a run; arrays are [S], one value per row."""

    now: np.ndarray
    """Last validation."""
    best: np.ndarray
    best_row: np.ndarray
    """Row of the best validation."""
    checks_since: np.ndarray
    """Number of validations after the best."""
    fell: np.ndarray
    """True if the last two validations are below the best by more than chance."""
    reward_change: np.ndarray
    """Recent training reward minus that around the best validation."""
    reward_error: float
    """Standard error of that change."""

    @property
    def reward_rose(self) -> np.ndarray:
        return self.reward_change > CERTAIN * self.reward_error

    @property
    def reward_fell(self) -> np.ndarray:
        return self.reward_change < -CERTAIN * self.reward_error

    @property
    def stalled(self) -> np.ndarray:
        """True if the best is older than three validations."""
        return self.checks_since > 3


def quality(curves: Curves) -> Quality | None:
    """Return the quality of a run; None without validation."""
    if not curves.has(VALIDATION):
        return None
    readings, rewards = curves.values(VALIDATION), curves.values("reward/mean")
    best_row = _best_rows(readings)
    now, best = forward_fill(readings), readings[best_row]
    checks = np.cumsum(np.isfinite(readings))
    prompts = np.maximum(np.nan_to_num(forward_fill(curves.values("val/prompts")), nan=PROMPTS), 1.0)
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
    """Return [S] int64: first row of the best reading so far; 0 before there is one."""
    rows, best = np.zeros(len(readings), np.int64), 0
    for row, reading in enumerate(readings):
        if np.isfinite(reading) and not reading <= readings[best]:
            best = row
        rows[row] = best
    return rows


def _at_last_check(below: np.ndarray, checks: np.ndarray) -> np.ndarray:
    """Return [S] `below` as of the validation before the last one; False if there was none."""
    first = np.searchsorted(checks, checks - 1)
    return below[first] & (checks > 1)


def _variance(share: np.ndarray) -> np.ndarray:
    return np.clip(share, 0, 1) * (1 - np.clip(share, 0, 1))


def _around(rewards: np.ndarray, best_row: np.ndarray) -> np.ndarray:
    """Return [S] mean rewards of the best row and its neighbours; the validated weights drew the next."""
    last = np.minimum(best_row + 1, np.arange(len(rewards)))
    return recent(rewards, 3)[last]
