"""The groups a step trains on: new ones from the collector, filtered, refilled within a budget, surplus kept.

Refills come in whole rounds and groups are chosen by prompt index, never by finishing time, so that short responses are
not preferred.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.algorithms import filtering
from mrl.config.root import Config
from mrl.config.sections.algorithm import FilterSection
from mrl.data.stream import PromptStream
from mrl.errors import RewardError, RolloutError
from mrl.loops import nan_guard
from mrl.loops.collect import Collector, has_reward, sampling_of, trainable
from mrl.loops.group_json import from_json, to_json
from mrl.samples import Group, Status, VerdictKind

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Supplied:
    """The groups of one step and what is told of them."""

    groups: list[Group]
    """In prompt order; fewer than asked for, possibly none, where the budget is spent."""
    served_version: int
    """The policy version that the engines put on the step's new samples; -1 where surplus made up the whole step."""
    metrics: dict[str, float]


class GroupSupply:
    """Hands out `loop.prompts_per_step` groups a step; knows the stream's position and the surplus."""

    def __init__(self, config: Config, stream: PromptStream) -> None:
        self._config, self._stream = config, stream
        self._surplus: list[Group] = []

    def take(self, collector: Collector, *, version: int) -> Supplied:
        """The groups of the step that trains `version`. RewardError where too many of its samples have no verdict,
        RolloutError where the budget is spent and the configuration says stop."""
        wanted, kept, generated = self._config.loop.prompts_per_step, self._surplus, []
        section = self._config.algorithm.filter
        rounds, account = 0, filtering.Account()
        while len(kept) < wanted and self._within_budget(rounds, len(generated)):
            missing = wanted - len(kept)
            fresh = collector.round(
                self._stream.take(missing if section is None else wanted), sampling_of(self._config)
            )
            nan_guard.check_rewards(fresh)
            generated += fresh
            with collector.clock.phase("filter"):
                kept = kept + self._filter(trainable(fresh), account)
            rounds += 1
        kept = sorted(kept, key=lambda group: group.prompt.index)
        chosen, self._surplus = kept[:wanted], kept[wanted:]
        metrics = (
            _statistics(generated)
            | account.metrics()
            | {
                "group/resampled": float(max(0, len(generated) - wanted)),
                "group/rounds": float(rounds),
                "group/surplus": float(len(self._surplus)),
                "group/short": float(wanted - len(chosen)),
                "reward/no_reward_frac": _no_reward(generated),
                "rollout/groups": float(len(chosen)),
            }
            | _ages(chosen, version)
        )
        self._check_budget(len(chosen), metrics)
        self._check_rewards(metrics["reward/no_reward_frac"])
        return Supplied(chosen, _newest(generated), metrics)

    def state(self) -> dict[str, Any]:
        """Position in the data and surplus groups, as JSON values."""
        return {"stream": self._stream.state(), "surplus": [to_json(group) for group in self._surplus]}

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state["stream"])
        self._surplus = [from_json(group, self._stream.prompt_at) for group in state["surplus"]]

    def _filter(self, groups: list[Group], account: filtering.Account) -> list[Group]:
        """The groups worth training on; booked with the reason also where all are kept."""
        section = self._config.algorithm.filter
        decisions = filtering.keep(section or FilterSection(), [_values(group) for group in groups])
        account.add(decisions, [group.prompt.domain for group in groups])
        if section is None:
            return groups
        return [
            g for g, decision in zip(groups, decisions, strict=True) if decision is filtering.Decision.KEPT
        ]

    def _within_budget(self, rounds: int, num_generated: int) -> bool:
        section = self._config.algorithm.filter
        if section is None:
            return rounds == 0
        return rounds < section.max_rounds and num_generated < section.max_prompts

    def _check_rewards(self, no_reward: float) -> None:
        limit = self._config.loop.max_no_reward_fraction
        if no_reward > limit:
            raise RewardError(
                f"{no_reward:.1%} of this step's samples have no reward, more than loop.max_no_reward_fraction = "
                f"{limit:.1%}; see the verifier's reasons in samples.jsonl and the log"
            )

    def _check_budget(self, num_groups: int, metrics: Mapping[str, float]) -> None:
        section, wanted = self._config.algorithm.filter, self._config.loop.prompts_per_step
        if num_groups == wanted or section is None:
            return
        text = (
            f"dynamic sampling found {num_groups} of {wanted} groups in {metrics['group/rounds']:.0f} rounds; "
            f"{metrics.get('group/all_correct_frac', 0.0):.0%} of the groups were all right, {metrics.get('group/all_wrong_frac', 0.0):.0%} all wrong"
        )
        if section.on_exhausted == "stop":
            raise RolloutError(
                f"{text}; raise algorithm.filter.max_rounds or max_prompts, or set on_exhausted: train_on_fewer"
            )
        log.warning("%s; training on fewer", text)


def _no_reward(groups: Sequence[Group]) -> float:
    samples = [s for g in groups for s in g.samples]
    no_reward = sum(s.verdict is None or s.verdict.kind is VerdictKind.NO_REWARD for s in samples)
    return no_reward / max(1, len(samples))


def _values(group: Group) -> np.ndarray:
    return np.array([s.verdict.value for s in group.samples if s.verdict is not None], dtype=np.float64)


def _statistics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of all scored samples generated for the step, before filtering."""
    samples = [s for g in groups for s in g.samples]
    scored = [s for s in samples if has_reward(s)]
    if not scored:
        return {"rollout/samples": float(len(samples))}
    rewards = np.array([s.verdict.value for s in scored if s.verdict is not None])
    lengths = np.array([len(s.response_tokens) for s in scored])
    high, low = rewards.max(), rewards.min()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/max": float(high),
        "reward/min": float(low),
        **_parts(scored),
        **_by_domain(scored),
        "rollout/samples": float(len(samples)),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_p99": float(np.percentile(lengths, 99)),
        "rollout/truncated_frac": float(np.mean([s.status is Status.TRUNCATED for s in scored])),
        "rollout/aborted": float(sum(s.status is Status.ABORTED for s in samples)),
        "rollout/failed": float(sum(s.status is Status.FAILED for s in samples)),
        "reward/seconds_p99": float(np.percentile([s.verdict.seconds for s in scored if s.verdict], 99)),
    }


def _parts(samples: Sequence[Any]) -> dict[str, float]:
    names = {name for s in samples for name in s.verdict.parts}
    return {
        f"reward/{n}": float(np.mean([s.verdict.parts.get(n, 0.0) for s in samples])) for n in sorted(names)
    }


def _by_domain(samples: Sequence[Any]) -> dict[str, float]:
    names = sorted({s.domain for s in samples})
    if len(names) < 2:
        return {}
    return {
        f"reward/mean/{n}": float(np.mean([s.verdict.value for s in samples if s.domain == n])) for n in names
    }


def _newest(groups: Sequence[Group]) -> int:
    return int(np.max([_policy_versions(group).max(initial=-1) for group in groups], initial=-1))


def _ages(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Versions between the weights that sampled the policy's tokens and those trained: the most, and who is not of today."""
    ages = [version - _policy_versions(group) for group in groups]
    tokens = np.concatenate(ages) if ages else np.zeros(0, np.int32)
    return {
        "policy/age_steps": float(tokens.max(initial=0)),
        "policy/aged_token_frac": float((tokens > 0).mean()) if len(tokens) else 0.0,
        "group/aged_frac": float(np.mean([(age > 0).any() for age in ages])) if ages else 0.0,
    }


def _policy_versions(group: Group) -> np.ndarray:
    """[n] of all tokens that the policy produced for one prompt."""
    versions = [s.policy_versions[s.loss_mask] for s in group.samples]
    return np.concatenate(versions) if versions else np.zeros(0, np.int32)
