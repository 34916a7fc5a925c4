"""How old what a step trains on is, and how far the policy has moved since: by the age of each token. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, TrainBatch


def ages_of(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Mean age of the policy's tokens trained at `version`, the share of each age, and segments of a sample."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    ages = version - np.concatenate([s.policy_versions[s.loss_mask] for s in samples])
    found = {
        "policy/age_mean": float(ages.mean()),
        "stream/segments_per_sample": float(np.mean([len(s.segments) for s in samples])),
    }
    return found | {f"policy/age_frac/{age}": float((ages == age).mean()) for age in np.unique(ages)}


def by_age(batch: TrainBatch, logprobs: np.ndarray) -> dict[str, float]:
    """For every age above 0 in the batch, from `logprobs` [N] of the weights that are trained: effective sample size of the
    weights w = exp(trained - sampled log-prob) as a share of the tokens, (sum w)^2 / (n sum w^2), and the k3 estimate of
    KL(sampled || trained) per token, mean(w - 1 - log w), in nats (http://joschu.net/blog/kl-approx.html). float64."""
    ages = batch.arrays["age"]
    found: dict[str, float] = {}
    for age in np.unique(ages[batch.loss_mask]):
        if age > 0:
            own = batch.loss_mask & (ages == age)
            log_w = logprobs[own].astype(np.float64) - batch.arrays["rollout_logprobs"][own]
            w = np.exp(log_w)
            found[f"policy/ess/{int(age)}"] = float(w.sum() ** 2 / (len(w) * (w**2).sum()))
            found[f"policy/kl_behaviour/{int(age)}"] = float((w - 1 - log_w).mean())
    return found
