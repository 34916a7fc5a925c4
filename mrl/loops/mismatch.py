"""How far the engine's log-probs lie from the trainer's for the same weights. Pure.

A router near-tie is no error: where the k-th and (k+1)-th expert are closer than rounding, the two engines may visit different
experts and the jump is real, for the token and for all that follow it in its sample. Those tokens are counted apart. Tokens of an
earlier version (surplus groups of dynamic sampling) say nothing about this one and are left out.
"""

from __future__ import annotations

import numpy as np

from mrl.errors import WeightSyncError
from mrl.samples import TrainBatch


def measure(
    batch: TrainBatch,
    trainer_logprobs: np.ndarray,
    router_margins: np.ndarray | None,
    *,
    served: np.ndarray,
    margin: float,
) -> dict[str, float]:
    """Mean and maximum of |engine - trainer| over the served policy tokens [N] outside near-ties; the near-ties' count and maximum.

    `served`: [N] bool, tokens of the version that the engines said they served, right or wrong, so that a missed weight sync
    shows in the numbers; what it says of other tokens than the policy's is not read.
    """
    mask = batch.loss_mask & served
    diff = np.abs(batch.arrays["rollout_logprobs"] - trainer_logprobs)
    ties = mask & (router_margins <= margin) if router_margins is not None else np.zeros_like(mask)
    clear = diff[mask & ~ties]
    return {
        "policy/rollout_logprob_diff_max": float(clear.max(initial=0.0)),
        "policy/rollout_logprob_diff_mean": float(clear.mean()) if len(clear) else 0.0,
        "policy/rollout_logprob_near_ties": float(ties.sum()),
        "policy/rollout_logprob_near_tie_diff_max": float(diff[ties].max(initial=0.0)),
    }


def check(metrics: dict[str, float], limit: float | None, *, version: int) -> None:
    """Raises WeightSyncError when the engines do not serve the trainer's weights."""
    found = metrics["policy/rollout_logprob_diff_max"]
    if limit is not None and not found <= limit:
        raise WeightSyncError(
            f"engine and trainer log-probs differ by {found:.3g} at version {version}, more than loop.max_rollout_mismatch = "
            f"{limit:g}: the engines do not serve the trainer's weights, or the dtypes are too coarse for this limit"
        )
