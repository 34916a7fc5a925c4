"""Staleness of the tokens that a step trains on, and how far the policy has moved since. Pure."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, TrainBatch


def newest_version(group: Group) -> int:
    """Return the newest version of a group's policy tokens; -1 without any."""
    return max((sampled for part in group.sequences() for *_, sampled in part.version_runs()), default=-1)


def token_counts(group: Group, version: int) -> np.ndarray:
    """Count a group's policy tokens by staleness at `version`: [largest + 1]; later versions count as 0."""
    runs = [run for sequence in group.sequences() for run in sequence.version_runs()]
    ages = [max(version - sampled, 0) for *_, sampled in runs]
    counts = np.zeros(max(ages, default=-1) + 1, np.int64)
    for age, (start, end, _) in zip(ages, runs, strict=True):
        counts[age] += end - start
    return counts


def largest_staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the largest staleness in versions, and the stale shares of tokens and groups."""
    counts = [token_counts(group, version) for group in groups]
    stale, tokens = sum(int(c[1:].sum()) for c in counts), sum(int(c.sum()) for c in counts)
    return {
        "policy/staleness_max": float(max((len(c) - 1 for c in counts if len(c)), default=0)),
        "policy/stale_token_frac": stale / max(1, tokens),
        "group/stale_frac": float(np.mean([c[1:].any() for c in counts])) if counts else 0.0,
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean staleness at `version`, the share of each staleness, and segments per sample."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    total: collections.Counter[int] = collections.Counter()
    for group in groups:
        total.update(dict(enumerate(token_counts(group, version).tolist())))
    tokens = max(1, total.total())
    metrics = {
        "policy/staleness_mean": sum(age * count for age, count in total.items()) / tokens,
        "stream/segments_per_sample": float(
            np.mean([sum(len(part.segments) for part in s.sequences) for s in samples])
        ),
    }
    return metrics | {
        f"policy/staleness_frac/{age}": count / tokens for age, count in sorted(total.items()) if count
    }


def drift_by_staleness(batch: TrainBatch, logprobs: np.ndarray) -> dict[str, float]:
    """Return effective sample size and KL per staleness above 0, from the trained weights' `logprobs` [N].

    Weights are w = exp(trained - sampled log-prob), in float64. The sample size is a share of the tokens:
    (sum w)^2 / (n sum w^2). KL(sampled || trained) is the k3 estimate mean(w - 1 - log w), in nats per token
    (http://joschu.net/blog/kl-approx.html)."""
    sums = np.zeros((int(batch.arrays["age"].max(initial=0)) + 1, 4))
    for piece in batch.pieces():
        age, trained = batch.arrays["age"][piece], batch.loss_mask[piece]
        log_w = logprobs[piece].astype(np.float64) - batch.arrays["rollout_logprobs"][piece]
        for lag in range(1, len(sums)):
            log_ratios = log_w[trained & (age == lag)]
            w = np.exp(log_ratios)
            sums[lag] += len(w), w.sum(), np.square(w).sum(), (w - 1 - log_ratios).sum()
    metrics: dict[str, float] = {}
    for lag, (count, total, squares, kl) in enumerate(sums.tolist()):
        if count:
            metrics[f"policy/ess/{lag}"] = total**2 / (count * squares)
            metrics[f"policy/kl_behaviour/{lag}"] = kl / count
    return metrics
