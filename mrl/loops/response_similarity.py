"""Similarity of a step's responses, and whether their length explains their reward (docs/diagnosis.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, Sample

WORDS = 8
"""Length in tokens of the runs that responses may share."""
LOOKED_AT = 256
"""Responses searched for shared runs, and tokens at the end of each; 16 million tokens take under 0.1 s."""


def response_similarity(groups: Sequence[Group]) -> dict[str, float]:
    """Return `rollout/distinct_frac`, `rollout/shared_run_frac`, `reward/length_correlation` if defined."""
    sample_lists = [group.samples for group in groups if len(group.samples) > 1]
    if not sample_lists:
        return {}
    metrics = {"rollout/distinct_frac": float(np.mean([_distinct(samples) for samples in sample_lists]))}
    metrics |= _shared([sample for group in groups for sample in group.samples])
    return metrics | _length_correlation(sample_lists)


def _distinct(samples: Sequence[Sample]) -> float:
    if len({s.response_tokens[:LOOKED_AT].tobytes() for s in samples}) == len(samples):
        return 1.0  # their beginnings differ already
    return len({sample.response_tokens.tobytes() for sample in samples}) / len(samples)


def _shared(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of evenly spaced responses that contain the most common run of WORDS tokens."""
    step = -(-len(samples) // LOOKED_AT)
    ends = [s.response_tokens[-LOOKED_AT:] for s in samples[::step]]
    runs = [_runs(tokens) for tokens in ends if len(tokens) >= WORDS]
    if not runs:
        return {}
    _, counts = np.unique(np.concatenate(runs), return_counts=True)
    return {"rollout/shared_run_frac": float(counts.max()) / len(ends)}


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Return the hashes of the distinct runs of WORDS tokens: [R] uint64."""
    factors = np.array([0x9E3779B97F4A7C15 ** (n + 1) % 2**64 for n in range(WORDS)], np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), WORDS)
    return np.unique((windows * factors).sum(axis=1, dtype=np.uint64))


def _length_correlation(sample_lists: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return Pearson's r of reward and length, minus their group means: prompt difficulty cancels out."""
    rewards, lengths = [], []
    for samples in sample_lists:
        scored = [s for s in samples if s.has_reward]
        if scored:
            values = np.array([s.verdict.value for s in scored if s.verdict], np.float64)
            sizes = np.array([s.num_policy_tokens for s in scored], np.float64)
            rewards.append(values - values.mean())
            lengths.append(sizes - sizes.mean())
    if not rewards:
        return {}
    reward, length = np.concatenate(rewards), np.concatenate(lengths)
    spread = float(np.sqrt((reward**2).sum() * (length**2).sum()))
    return {"reward/length_correlation": float(reward @ length) / spread} if spread > 0 else {}
