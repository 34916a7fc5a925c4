"""Generated series of metrics with known changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

HEALTHY: dict[str, tuple[float, float]] = {
    "reward/mean": (0.3, 0.8), "reward/max": (1.0, 1.0), "reward/min": (0.0, 0.0),
    "reward/no_reward_frac": (0.0, 0.0), "group/kept_frac": (0.7, 0.4),
    "group/degenerate_samples_frac": (0.3, 0.6), "group/all_correct_frac": (0.1, 0.5),
    "group/all_incorrect_frac": (0.3, 0.05), "rollout/distinct_frac": (0.8, 0.3),
    "policy/entropy": (0.5, 0.12), "policy/rollout_mismatch_kl": (1e-4, 3e-4),
    "critic/error_squared": (0.2, 0.1), "critic/explained_variance": (0.0, 0.4),
    "optim/grad_norm": (3.0, 6.0), "val/reward": (0.3, 0.85),
}  # fmt: skip
"""Metric -> its value at the first and the last step of a run that learns its task."""


def made(
    to: Mapping[str, tuple[float, float]] = {}, *, change: int = 40, steps: int = 80, seed: int = 0
) -> list[dict[str, Any]]:
    """Return rows of a healthy run with noise; from `change` on, metrics in `to` go from first to second."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step, "val/prompts": 512.0}
        for name in dict.fromkeys([*HEALTHY, *to]):
            pair = HEALTHY.get(name, to.get(name, (0.0, 0.0)))
            if (step == 0 and not name.startswith("val/")) or (name.startswith("val/") and step % 5):
                continue
            first, last = to[name] if name in to and step >= change else pair
            begin, end = (change, steps) if name in to and step >= change else (0, steps)
            value = first + (last - first) * (step - begin) / max(1, end - begin)
            row[name] = value * (1 + 0.02 * rng.standard_normal() * (not name.endswith(("/max", "/min"))))
        rows.append(row)
    return rows
