"""Rewards on held-out prompts: greedy responses, and avg@k and pass@k of k samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from mrl.config.root import Config
from mrl.loops.rollout_thread import RolloutThread
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one prompt's samples in a validation."""

    domain: str
    tag: str
    of_samples: Sequence[float | None]
    """`validation_score` each sample."""

    @classmethod
    def of(cls, group: Group, reward: RewardSection) -> Self:
        prompt = group.prompt
        has_parts = len(reward.for_domain(prompt.domain).verifiers()) > 1
        return cls(
            prompt.domain,
            prompt.tag,
            [validation_score(sample, has_parts=has_parts) for sample in group.samples],
        )

    @property
    def known(self) -> list[float]:
        """Scores of the samples that have a reward."""
        return [score for score in self.of_samples if score is not None]


def validate(
    rollouts: RolloutThread, prompts: Sequence[Prompt], config: Config
) -> tuple[dict[str, float], list[Group]]:
    """Return the `validation_metrics` of the prompts, and the greedy groups."""
    sampling, reward = validation_sampling_of(config), config.reward
    groups = rollouts.groups(prompts, greedy_sampling(sampling))
    sampled = rollouts.groups(prompts, sampling) if sampling.num_samples else []
    scores = [[Scores.of(group, reward) for group in batch] for batch in (groups, sampled)]
    return validation_metrics(*scores, reward=reward), groups


def validation_metrics(
    responses: Sequence[Scores], sampled: Sequence[Scores] = (), *, reward: RewardSection
) -> dict[str, float]:
    """Return `val/reward` of greedy responses, also by domain and tag, and `val/avg@k` and `val/pass@k` of k
    samples per prompt. `val/accuracy` repeats a reward that is a share of correct responses."""
    metrics = _means("", responses, reward)
    metrics["val/prompts"] = float(len(responses))
    metrics["val/no_reward"] = float(
        sum(score is None for prompt in responses for score in prompt.of_samples)
    )
    for field in ("domain", "tag"):
        names = sorted({getattr(prompt, field) for prompt in responses})
        for name in names if len(names) > 1 else ():
            members = [prompt for prompt in responses if getattr(prompt, field) == name]
            metrics |= _means(f"/{name or 'untagged'}", members, reward)
    if sampled:
        k = len(sampled[0].of_samples)
        metrics[f"val/avg@{k}"] = _mean(sampled)
        metrics[f"val/pass@{k}"] = float(
            np.mean([max(prompt.known, default=0.0) >= 1.0 for prompt in sampled])
        )
    return metrics


def gives_binary_rewards(reward: RewardSection, domain: str) -> bool:
    """Return True if the kind of the domain's first verifier gives no scores but 0 and 1."""
    first, *others = reward.for_domain(domain).verifiers()
    weighs = not others and first.weight != 1
    return reward_kind(first).is_binary and first.min_reward in (0.0, 1.0) and not weighs


def greedy_sampling(sampling: Sampling) -> Sampling:
    """Return the sampling of one greedy response."""
    return dataclasses.replace(sampling, num_samples=1, greedy=True)


def validation_sampling_of(config: Config) -> Sampling:
    """Return the sampling of a validation: as in training, unless loop.validation overrides it."""
    section = config.loop.validation
    overrides = {n: getattr(section, n) for n in ("temperature", "top_p", "top_k")}
    return dataclasses.replace(
        Sampling.of(config),
        num_samples=section.num_samples,
        **{name: value for name, value in overrides.items() if value is not None},
    )


def validation_score(sample: Sample, *, has_parts: bool) -> float | None:
    """Return the verdict's value, or the first verifier's if there are several; None without a reward."""
    if not sample.has_reward:
        return None
    verdict = sample.verdict
    assert verdict is not None and verdict.value is not None
    return next(iter(verdict.parts.values())) if has_parts and verdict.parts else verdict.value


def _means(suffix: str, prompts: Sequence[Scores], reward: RewardSection) -> dict[str, float]:
    mean, domains = _mean(prompts), {prompt.domain for prompt in prompts}
    is_share = all(gives_binary_rewards(reward, domain) for domain in domains)
    names = ("val/reward", "val/accuracy") if is_share else ("val/reward",)
    return {name + suffix: mean for name in names}


def _mean(prompts: Sequence[Scores]) -> float:
    scores = [score for prompt in prompts for score in prompt.known]
    return float(np.mean(scores)) if scores else 0.0
