"""Accuracy on held-out prompts: greedy, and avg@k and pass@k of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mrl.config.root import Config
from mrl.loops.collect import Collector, has_reward, sampling_of
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample


def validate(
    collector: Collector,
    prompts: Sequence[Prompt],
    config: Config,
    *,
    on_sampled: Callable[[list[Group]], None] = lambda groups: None,
) -> tuple[dict[str, float], list[Group]]:
    """`val/accuracy` (greedy), by domain and tag too, and `val/avg@k`, `val/pass@k` where configured; the greedy groups.

    `on_sampled` is called with the groups of k samples, where there are any.
    """
    sampling = validation_sampling_of(config)
    groups = collector.round(prompts, dataclasses.replace(sampling, num_samples=1, greedy=True))
    metrics = {"val/accuracy": _mean([_scores(g) for g in groups]), "val/prompts": float(len(prompts))}
    metrics["val/no_reward"] = float(sum(not has_reward(s) for g in groups for s in g.samples))
    metrics |= _by(groups, "domain") | _by(groups, "tag")
    if k := sampling.num_samples:
        sampled = collector.round(prompts, sampling)
        on_sampled(sampled)
        metrics[f"val/avg@{k}"] = _mean([_scores(g) for g in sampled])
        metrics[f"val/pass@{k}"] = float(np.mean([max(_scores(g), default=0.0) >= 1.0 for g in sampled]))
    return metrics, groups


def validation_sampling_of(config: Config) -> Sampling:
    """How the samples of a validation are drawn: as in training where loop.validation says nothing else."""
    section = config.loop.validation
    own = {n: getattr(section, n) for n in ("temperature", "top_p", "top_k", "min_p")}
    return dataclasses.replace(
        sampling_of(config),
        num_samples=section.num_samples,
        **{name: value for name, value in own.items() if value is not None},
    )


def correctness(sample: Sample) -> float:
    """1 for a right answer: the first named part of the verdict where it has parts (format bonuses aside), else its value."""
    verdict = sample.verdict
    assert verdict is not None and verdict.value is not None
    return next(iter(verdict.parts.values())) if verdict.parts else verdict.value


def _scores(group: Group) -> list[float]:
    return [correctness(s) for s in group.samples if has_reward(s)]


def _mean(scores: Sequence[Sequence[float]]) -> float:
    flat = [value for group in scores for value in group]
    return float(np.mean(flat)) if flat else 0.0


def _by(groups: Sequence[Group], field: str) -> dict[str, float]:
    """Accuracy for each value of a prompt's field, when there is more than one."""
    names = sorted({getattr(g.prompt, field) for g in groups})
    if len(names) < 2:
        return {}
    return {
        f"val/accuracy/{name or 'untagged'}": _mean(
            [_scores(g) for g in groups if getattr(g.prompt, field) == name]
        )
        for name in names
    }
