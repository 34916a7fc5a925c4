"""Accuracy on held-out prompts: greedy, and avg@k and pass@k of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from mrl.config.root import Config
from mrl.loops.collect import Collector, has_reward, sampling_of
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What a validation takes from the samples of one prompt."""

    domain: str
    tag: str
    of_samples: Sequence[float | None]
    """`score_of` each."""

    @classmethod
    def of(cls, group: Group) -> Self:
        return cls(group.prompt.domain, group.prompt.tag, [score_of(sample) for sample in group.samples])

    @property
    def known(self) -> list[float]:
        """Those of samples with a reward."""
        return [score for score in self.of_samples if score is not None]


def validate(
    collector: Collector, prompts: Sequence[Prompt], config: Config
) -> tuple[dict[str, float], list[Group]]:
    """The `accuracy` of the prompts, and the greedy groups."""
    sampling = validation_sampling_of(config)
    groups = collector.round(prompts, greedy(sampling))
    sampled = collector.round(prompts, sampling) if sampling.num_samples else []
    return accuracy(list(map(Scores.of, groups)), list(map(Scores.of, sampled))), groups


def accuracy(responses: Sequence[Scores], sampled: Sequence[Scores] = ()) -> dict[str, float]:
    """`val/accuracy` of greedy responses, by domain and tag too, and of k samples of each prompt `val/avg@k` and `val/pass@k`."""
    metrics = {"val/accuracy": _mean(responses), "val/prompts": float(len(responses))}
    metrics["val/no_reward"] = float(sum(score is None for each in responses for score in each.of_samples))
    metrics |= _by(responses, "domain") | _by(responses, "tag")
    if sampled:
        k = len(sampled[0].of_samples)
        metrics[f"val/avg@{k}"] = _mean(sampled)
        metrics[f"val/pass@{k}"] = float(np.mean([max(each.known, default=0.0) >= 1.0 for each in sampled]))
    return metrics


def greedy(sampling: Sampling) -> Sampling:
    """One response, of the likeliest tokens."""
    return dataclasses.replace(sampling, num_samples=1, greedy=True)


def validation_sampling_of(config: Config) -> Sampling:
    """How the samples of a validation are drawn: as in training where loop.validation says nothing else."""
    section = config.loop.validation
    own = {n: getattr(section, n) for n in ("temperature", "top_p", "top_k", "min_p")}
    return dataclasses.replace(
        sampling_of(config),
        num_samples=section.num_samples,
        **{name: value for name, value in own.items() if value is not None},
    )


def score_of(sample: Sample) -> float | None:
    """1 for a right answer: the first named part of the verdict where it has parts (format bonuses aside), else its value; None without
    a reward."""
    if not has_reward(sample):
        return None
    verdict = sample.verdict
    assert verdict is not None and verdict.value is not None
    return next(iter(verdict.parts.values())) if verdict.parts else verdict.value


def _mean(prompts: Sequence[Scores]) -> float:
    scores = [score for each in prompts for score in each.known]
    return float(np.mean(scores)) if scores else 0.0


def _by(prompts: Sequence[Scores], field: str) -> dict[str, float]:
    """Accuracy for each value of a prompt's field, when there is more than one."""
    names = sorted({getattr(each, field) for each in prompts})
    if len(names) < 2:
        return {}
    return {
        f"val/accuracy/{name or 'untagged'}": _mean([e for e in prompts if getattr(e, field) == name])
        for name in names
    }
