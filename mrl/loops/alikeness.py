"""How alike a step's responses are, and whether their length explains their reward: what diagnosis reads (docs/diagnosis.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, Sample

WORDS = 8
"""Tokens of a run of tokens that responses may share."""
LOOKED_AT = 256
"""Responses, and tokens from the end of each, in which runs are looked for: a step of 16 million tokens stays below 0.1 s."""


def alikeness(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/distinct_frac`, `rollout/shared_run_frac` and `reward/length_correlation`, each where it can be said."""
    several = [group.samples for group in groups if len(group.samples) > 1]
    if not several:
        return {}
    metrics = {"rollout/distinct_frac": float(np.mean([_distinct(samples) for samples in several]))}
    metrics |= _shared([sample for group in groups for sample in group.samples])
    return metrics | _length_correlation(several)


def _distinct(samples: Sequence[Sample]) -> float:
    if len({s.response_tokens[:LOOKED_AT].tobytes() for s in samples}) == len(samples):
        return 1.0  # without a look at the rest
    return len({sample.response_tokens.tobytes() for sample in samples}) / len(samples)


def _shared(samples: Sequence[Sample]) -> dict[str, float]:
    """Of evenly chosen responses, the share that has the run of WORDS tokens which most of them have."""
    step = -(-len(samples) // LOOKED_AT)
    ends = [s.response_tokens[-LOOKED_AT:] for s in samples[::step]]
    runs = [_runs(tokens) for tokens in ends if len(tokens) >= WORDS]
    if not runs:
        return {}
    _, counts = np.unique(np.concatenate(runs), return_counts=True)
    return {"rollout/shared_run_frac": float(counts.max()) / len(ends)}


def _runs(tokens: np.ndarray) -> np.ndarray:
    """[R] uint64: a hash of each of its runs of WORDS tokens, once."""
    factors = np.array([0x9E3779B97F4A7C15 ** (n + 1) % 2**64 for n in range(WORDS)], np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), WORDS)
    return np.unique((windows * factors).sum(axis=1, dtype=np.uint64))


def _length_correlation(several: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Pearson's, of reward and length less their group's means, so that long prompts' hardness does not count."""
    rewards, lengths = [], []
    for samples in several:
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
