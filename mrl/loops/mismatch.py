"""Difference between the engine's and the trainer's log-probs for the same weights. Pure.

A router near-tie is not an error: if the k-th and (k+1)-th experts differ by less than rounding, engine and
trainer may choose different experts, and the jump is real for this token and all later ones of its sample.
Those tokens are counted separately. Tokens of an earlier version (surplus of dynamic sampling) are left out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.errors import WeightSyncError
from mrl.samples import TrainBatch

ROUTER_MARGIN = 1e-5
"""Largest router margin, of a token or its prefix, of a near-tie."""


def measure_mismatch(
    batch: TrainBatch,
    trainer_logprobs: np.ndarray,
    router_margins: np.ndarray | None,
    *,
    served: np.ndarray,
    margin: float,
) -> dict[str, float]:
    """Return mean and maximum of |engine - trainer| over served policy tokens [N] outside near-ties.

    `served`: [N] bool, tokens of the version that the engines reported, correct or not, so that a missed
    weight sync shows; only read for policy tokens. Near-ties have their own count and maximum."""
    clear, near = _Gaps(), _Gaps()
    for piece in batch.pieces():
        mask = batch.loss_mask[piece] & served[piece]
        diff = np.abs(batch.arrays["rollout_logprobs"][piece] - trainer_logprobs[piece])
        if router_margins is not None:
            ties = mask & (router_margins[piece] <= margin)
            near.add(diff[ties])
            mask &= ~ties
        clear.add(diff[mask])
    metrics = {
        "policy/rollout_logprob_near_ties": float(near.count),
        "policy/rollout_logprob_near_tie_diff_max": near.largest,
    }
    if clear.count:
        metrics["policy/rollout_logprob_diff_max"] = clear.largest
        metrics["policy/rollout_logprob_diff_mean"] = clear.total / clear.count
    return metrics


@dataclasses.dataclass(slots=True)
class _Gaps:
    """Differences seen so far; a NaN stays."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, diff: np.ndarray) -> None:
        self.count += len(diff)
        self.total += float(diff.sum(dtype=np.float64))
        self.largest = float(np.maximum(self.largest, diff.max(initial=0.0)))


def check_mismatch(metrics: dict[str, float], limit: float | None, *, version: int) -> None:
    """Raise WeightSyncError if the engines do not serve the trainer's weights."""
    diff = metrics.get("policy/rollout_logprob_diff_max", 0.0)
    if limit is not None and not diff <= limit:
        raise WeightSyncError(
            f"engine and trainer log-probs differ by {diff:.3g} at version {version}, more than "
            f"loop.max_rollout_mismatch = {limit:g}: the engines do not serve the trainer's weights, or the "
            "dtypes are too coarse for this limit"
        )
