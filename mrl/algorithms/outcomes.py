"""From outcomes to shaped rewards: facts that workers report about samples, and the shaping of rewards.

Owns the reading of groups into [B] arrays in the batch's order, the shaping formulas, and their order.
Lengths count policy tokens (the mask's sum), never spans that include environment tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.tokens import check_samples
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.shaping import OverlongSection, ShapingSection
from mrl.samples import Group, Sample, Status, TrainBatch, VerdictKind


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """Per-sample facts that shape rewards."""

    rewards: np.ndarray
    """[B] float64 raw rewards; NaN if there is none."""
    finished: np.ndarray
    """[B] bool: the policy produced the end-of-text token."""
    truncated: np.ndarray
    """[B] bool: the response reached its token limit first."""
    domains: tuple[str, ...]
    """B names."""
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """[B] float64 components of the reward by name, 0 if a sample lacks one."""
    token_rewards: np.ndarray | None = None
    """[N] float64 process rewards aligned with the batch's tokens; NaN if there is none."""
    are_returns: np.ndarray | None = None
    """[B] bool: the sample's reward is the sum of its process rewards; None if that holds for no sample."""

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
        """Read groups in the order in which they were packed."""
        samples = [sample for group in groups for sample in group.samples]
        names = sorted({name for s in samples if s.verdict for name in s.verdict.parts})
        return cls(
            rewards=np.array([_value(s) for s in samples], dtype=np.float64),
            finished=np.array([s.status is Status.FINISHED for s in samples], dtype=np.bool_),
            truncated=np.array([s.status is Status.TRUNCATED for s in samples], dtype=np.bool_),
            domains=tuple(s.domain for s in samples),
            parts={name: np.array([_part(s, name) for s in samples], dtype=np.float64) for name in names},
            token_rewards=_token_rewards(samples),
            are_returns=_are_returns(samples),
        )

    @classmethod
    def plain(cls, rewards: np.ndarray) -> Outcomes:
        """Build from rewards alone: every sample finished, one domain."""
        count = len(rewards)
        return cls(
            rewards=np.asarray(rewards, dtype=np.float64),
            finished=np.ones(count, dtype=np.bool_),
            truncated=np.zeros(count, dtype=np.bool_),
            domains=("default",) * count,
        )


def policy_lengths(batch: TrainBatch) -> np.ndarray:
    """Return [B] float64 policy tokens per sample (the mask's sum, not the span)."""
    spans = batch.spans(np.arange(batch.num_samples))
    return np.array([np.count_nonzero(batch.loss_mask[span]) for span in spans], dtype=np.float64)


def _value(sample: Sample) -> float:
    verdict = sample.verdict
    if verdict is None or verdict.kind is VerdictKind.NO_REWARD or verdict.value is None:
        return float("nan")
    return float(verdict.value)


def _part(sample: Sample, name: str) -> float:
    return float(sample.verdict.parts.get(name, 0.0)) if sample.verdict else 0.0


def _are_returns(samples: Sequence[Sample]) -> np.ndarray | None:
    flags = np.array([s.verdict is not None and s.verdict.is_return for s in samples], dtype=np.bool_)
    return flags if flags.any() else None


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
                f"sample {sample.sample_id}: {len(response)} token_values "
                f"for {len(sample.response_tokens)} tokens"
            )
        pieces += [np.full(len(b.prompt_tokens) + len(b.response_tokens), np.nan) for b in sample.branches]
        pieces += [np.full(len(sample.prompt_tokens), np.nan), response]
    return np.concatenate(pieces)


def shape_by_domain(
    config: AlgorithmSection, outcomes: Outcomes, *, lengths: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return ([B] float64 shaped rewards, 0 without a reward; metrics over the scored samples).

    `lengths` [B] in policy tokens. Raise ValueError for an infinite reward, with its sample.
    """
    rewards, has_reward = torch.from_numpy(outcomes.rewards), torch.from_numpy(outcomes.has_reward)
    check_samples("rewards", rewards.masked_fill(~has_reward, 0.0), len(has_reward))
    shaped, clipped = torch.zeros_like(rewards), torch.zeros_like(has_reward)
    finished, truncated = torch.from_numpy(outcomes.finished), torch.from_numpy(outcomes.truncated)
    names = np.array(outcomes.domains)
    for domain in sorted(set(outcomes.domains)):
        chosen = has_reward & torch.from_numpy(names == domain)
        if not bool(chosen.any()):
            continue
        section = config.shaping_by_domain.get(domain, config.shaping)
        values, clipped[chosen] = clip(rewards[chosen], section.clip)
        shaped[chosen] = shape(section, values, lengths[chosen], finished[chosen], truncated[chosen])
    count = max(1, int(has_reward.sum()))
    return shaped, {
        "reward/raw_mean": float(torch.nan_to_num(rewards).sum()) / count,
        "reward/shaped_mean": float(shaped.sum()) / count,
        "reward/clipped_frac": float(clipped.sum()) / count,
    }


def masked_truncated(config: AlgorithmSection, outcomes: Outcomes) -> np.ndarray:
    """Return [B] bool: truncated samples whose domain masks them."""
    masks = [config.shaping_by_domain.get(d, config.shaping).mask_truncated for d in outcomes.domains]
    return outcomes.truncated & np.array(masks, dtype=np.bool_)


def clip(rewards: Tensor, bounds: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """Return ([B] rewards clipped to the bounds, [B] bool: changed)."""
    clipped = rewards if bounds is None else rewards.clamp(*bounds)
    return clipped, clipped != rewards


def shape(
    section: ShapingSection, rewards: Tensor, lengths: Tensor, finished: Tensor, truncated: Tensor
) -> Tensor:
    """Apply one domain's penalties for length and end to clipped rewards [B], in the section's order."""
    if section.overlong is not None:
        rewards = rewards + overlong_penalty(section.overlong, lengths)
    if section.stop_properly is not None:
        rewards = stop_properly(rewards, truncated, coefficient=section.stop_properly)
    if section.missing_eos_penalty:
        rewards = rewards - section.missing_eos_penalty * (~finished).to(rewards.dtype)
    return rewards


def overlong_penalty(section: OverlongSection, lengths: Tensor) -> Tensor:
    """Return [B] penalties: 0 up to max_tokens - buffer_tokens, then linearly to -factor at max_tokens.

    DAPO (arXiv 2503.14476, eq. 13); verl's keeps growing beyond max_tokens. Lengths in policy tokens. Worked
    example: max 100, buffer 20, lengths 80, 90, 120 give 0, -0.5, -1.
    """
    threshold = section.max_tokens - section.buffer_tokens
    share = (lengths.to(torch.float64) - threshold) / section.buffer_tokens
    return -section.factor * share.clamp(min=0.0, max=1.0)


def stop_properly(rewards: Tensor, truncated: Tensor, *, coefficient: float) -> Tensor:
    """Penalise truncated samples (ProRL): a coefficient in [0, 1] multiplies the reward, below 0 replaces it.

    Deviation: only positive rewards are multiplied (OpenRLHF: all), because a factor below 1 would make a
    truncated incorrect answer better than a finished one.
    """
    if coefficient < 0:
        return torch.where(truncated, rewards.new_tensor(coefficient), rewards)
    return torch.where(truncated & (rewards > 0), rewards * coefficient, rewards)
