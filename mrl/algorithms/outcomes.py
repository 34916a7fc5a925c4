"""What the rollout and the verifier said about the samples of a batch, as arrays.

Owns the reading of groups into arrays [B], in the batch's order. No shaping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mrl.samples import Group, Sample, Status, TrainBatch, VerdictKind


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """Per-sample facts that rewards are shaped with."""

    rewards: np.ndarray
    """[B] float64 raw rewards; NaN where there is no verdict."""
    finished: np.ndarray
    """[B] bool: the policy produced the end-of-text token."""
    truncated: np.ndarray
    """[B] bool: the response limit was reached first."""
    domains: tuple[str, ...]
    """B names."""
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """[B] float64 components of the reward, 0 where a sample lacks one."""
    token_rewards: np.ndarray | None = None
    """[N] float64 process rewards aligned with the batch's tokens; NaN where there is none."""

    def __post_init__(self) -> None:
        count = len(self.rewards)
        lengths = {
            "finished": len(self.finished),
            "truncated": len(self.truncated),
            "domains": len(self.domains),
            **{f"parts[{name}]": len(values) for name, values in self.parts.items()},
        }
        for name, length in lengths.items():
            if length != count:
                raise ValueError(f"{name}: {length} entries, but there are {count} rewards")

    @property
    def has_reward(self) -> np.ndarray:
        """[B] bool."""
        return ~np.isnan(self.rewards)

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Outcomes:
        """From groups in the order in which they were packed."""
        samples = [sample for group in groups for sample in group.samples]
        names = sorted({name for s in samples if s.verdict for name in s.verdict.parts})
        return cls(
            rewards=np.array([_value(s) for s in samples], dtype=np.float64),
            finished=np.array([s.status is Status.FINISHED for s in samples], dtype=np.bool_),
            truncated=np.array([s.status is Status.TRUNCATED for s in samples], dtype=np.bool_),
            domains=tuple(s.domain for s in samples),
            parts={name: np.array([_part(s, name) for s in samples], dtype=np.float64) for name in names},
            token_rewards=_token_rewards(samples),
        )

    @classmethod
    def plain(cls, rewards: np.ndarray) -> Outcomes:
        """Rewards alone: every sample finished, one domain."""
        count = len(rewards)
        return cls(
            rewards=np.asarray(rewards, dtype=np.float64),
            finished=np.ones(count, dtype=np.bool_),
            truncated=np.zeros(count, dtype=np.bool_),
            domains=("default",) * count,
        )


def policy_lengths(batch: TrainBatch) -> np.ndarray:
    """[B] float64 policy tokens per sample (the mask's sum, not the span)."""
    bounds = np.concatenate([[0], np.cumsum(batch.loss_mask)])
    return (bounds[batch.cu_seqlens[1:]] - bounds[batch.cu_seqlens[:-1]]).astype(np.float64)


def _value(sample: Sample) -> float:
    verdict = sample.verdict
    if verdict is None or verdict.kind is VerdictKind.NO_REWARD or verdict.value is None:
        return float("nan")
    return float(verdict.value)


def _part(sample: Sample, name: str) -> float:
    return float(sample.verdict.parts.get(name, 0.0)) if sample.verdict else 0.0


def _token_rewards(samples: Sequence[Sample]) -> np.ndarray | None:
    values = [None if s.verdict is None else s.verdict.token_values for s in samples]
    if all(v is None for v in values):
        return None
    pieces = []
    for sample, value in zip(samples, values, strict=True):
        response = (
            np.full(len(sample.response_tokens), np.nan) if value is None else np.asarray(value, np.float64)
        )
        if len(response) != len(sample.response_tokens):
            raise ValueError(
                f"sample {sample.sample_id}: {len(response)} token_values for {len(sample.response_tokens)} tokens"
            )
        pieces += [np.full(len(sample.prompt_tokens), np.nan), response]
    return np.concatenate(pieces)
