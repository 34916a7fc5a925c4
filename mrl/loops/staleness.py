"""How old what a step trains on is, and how far the policy has moved since: by the age of each token. Pure."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, TrainBatch


def newest_version(group: Group) -> int:
    """Of the policy's tokens of one prompt; -1 without any."""
    return max((sampled for sample in group.samples for *_, sampled in sample.version_runs()), default=-1)


def token_counts(group: Group, version: int) -> np.ndarray:
    """[oldest age + 1] the policy's tokens of one prompt by their age at `version`; 0 for those of a later one."""
    runs = [run for sample in group.samples for run in sample.version_runs()]
    ages = [max(version - sampled, 0) for *_, sampled in runs]
    counts = np.zeros(max(ages, default=-1) + 1, np.int64)
    for age, (start, end, _) in zip(ages, runs, strict=True):
        counts[age] += end - start
    return counts


def oldest(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Versions between the weights that sampled the policy's tokens and those trained: the most, and who is not of today."""
    counts = [token_counts(group, version) for group in groups]
    aged, tokens = sum(int(c[1:].sum()) for c in counts), sum(int(c.sum()) for c in counts)
    return {
        "policy/age_steps": float(max((len(c) - 1 for c in counts if len(c)), default=0)),
        "policy/aged_token_frac": aged / max(1, tokens),
        "group/aged_frac": float(np.mean([c[1:].any() for c in counts])) if counts else 0.0,
    }


def ages_of(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Mean age of the policy's tokens trained at `version`, the share of each age, and segments of a sample."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    total: collections.Counter[int] = collections.Counter()
    for group in groups:
        total.update(dict(enumerate(token_counts(group, version).tolist())))
    tokens = max(1, total.total())
    found = {
        "policy/age_mean": sum(age * count for age, count in total.items()) / tokens,
        "stream/segments_per_sample": float(np.mean([len(s.segments) for s in samples])),
    }
    return found | {f"policy/age_frac/{age}": count / tokens for age, count in sorted(total.items()) if count}


def by_age(batch: TrainBatch, logprobs: np.ndarray) -> dict[str, float]:
    """For every age above 0 in the batch, from `logprobs` [N] of the weights that are trained: effective sample size of the
    weights w = exp(trained - sampled log-prob) as a share of the tokens, (sum w)^2 / (n sum w^2), and the k3 estimate of
    KL(sampled || trained) per token, mean(w - 1 - log w), in nats (http://joschu.net/blog/kl-approx.html). float64."""
    sums = np.zeros((int(batch.arrays["age"].max(initial=0)) + 1, 4))
    for piece in batch.pieces():
        age, trained = batch.arrays["age"][piece], batch.loss_mask[piece]
        log_w = logprobs[piece].astype(np.float64) - batch.arrays["rollout_logprobs"][piece]
        for aged in range(1, len(sums)):
            own = log_w[trained & (age == aged)]
            w = np.exp(own)
            sums[aged] += len(w), w.sum(), np.square(w).sum(), (w - 1 - own).sum()
    found: dict[str, float] = {}
    for aged, (count, total, squares, kl) in enumerate(sums.tolist()):
        if count:
            found[f"policy/ess/{aged}"] = total**2 / (count * squares)
            found[f"policy/kl_behaviour/{aged}"] = kl / count
    return found
