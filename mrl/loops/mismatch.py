"""How far the engine's log-probs lie from the trainer's for the same weights. Pure.

A router near-tie is no error: where the k-th and (k+1)-th expert are closer than rounding, the two engines may visit different
experts and the jump is real, for the token and for all that follow it in its sample. Those tokens are counted apart. Tokens of an
earlier version (surplus groups of dynamic sampling) say nothing about this one and are left out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.errors import WeightSyncError
from mrl.samples import TrainBatch

ROUTER_MARGIN = 1e-5
"""Tokens whose (prefix's) router margin is below this count as near-ties."""


def measure_mismatch(
    batch: TrainBatch,
    trainer_logprobs: np.ndarray,
    router_margins: np.ndarray | None,
    *,
    served: np.ndarray,
    margin: float,
) -> dict[str, float]:
    """Mean and maximum of |engine - trainer| over the served policy tokens [N] outside near-ties, where there are any; the near-ties' count and maximum.

    `served`: [N] bool, tokens of the version that the engines said they served, right or wrong, so that a missed weight sync
    shows in the numbers; what it says of other tokens than the policy's is not read.
    """
    clear, near = _Gaps(), _Gaps()
    for piece in batch.pieces():
        mask = batch.loss_mask[piece] & served[piece]
        diff = np.abs(batch.arrays["rollout_logprobs"][piece] - trainer_logprobs[piece])
        if router_margins is not None:
            ties = mask & (router_margins[piece] <= margin)
            near.add(diff[ties])
            mask &= ~ties
        clear.add(diff[mask])
    found = {
        "policy/rollout_logprob_near_ties": float(near.count),
        "policy/rollout_logprob_near_tie_diff_max": near.largest,
    }
    if clear.count:
        found["policy/rollout_logprob_diff_max"] = clear.largest
        found["policy/rollout_logprob_diff_mean"] = clear.total / clear.count
    return found


@dataclasses.dataclass(slots=True)
class _Gaps:
    """Distances seen so far; one that is no number stays."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, diff: np.ndarray) -> None:
        self.count += len(diff)
        self.total += float(diff.sum(dtype=np.float64))
        self.largest = float(np.maximum(self.largest, diff.max(initial=0.0)))


def check_mismatch(metrics: dict[str, float], limit: float | None, *, version: int) -> None:
    """Raises WeightSyncError when the engines do not serve the trainer's weights."""
    found = metrics.get("policy/rollout_logprob_diff_max", 0.0)
    if limit is not None and not found <= limit:
        raise WeightSyncError(
            f"engine and trainer log-probs differ by {found:.3g} at version {version}, more than loop.max_rollout_mismatch = "
            f"{limit:g}: the engines do not serve the trainer's weights, or the dtypes are too coarse for this limit"
        )
