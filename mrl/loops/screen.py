"""Which judged groups are worth training on, and the account of them that a step's row tells."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.algorithms import filtering
from mrl.config.root import Config
from mrl.config.sections.algorithm import FilterSection
from mrl.errors import RewardError
from mrl.loops import nan_guard
from mrl.loops.alikeness import alikeness
from mrl.loops.episode_metrics import episode_metrics
from mrl.loops.staleness import newest_version, oldest
from mrl.loops.witnesses import Witnesses
from mrl.observe.ledger_log import Standing
from mrl.pool.ledger import GroupEnd
from mrl.samples import Group, Sample, Status, VerdictKind

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Screened:
    """Judged groups, and what is worth training on of them."""

    judged: tuple[Group, ...]
    """With all their samples."""
    scored: list[Group]
    """With the samples that have a reward; groups left empty are gone."""
    decisions: list[filtering.Decision]
    """Of each scored group, also where the run has no filter."""
    kept: list[Group]
    """The scored groups that the run's filter keeps."""

    def dropped(self) -> dict[int, GroupEnd]:
        """How the groups end that are not kept, by their prompts' indices."""
        kept, scored = ({group.prompt.index for group in groups} for groups in (self.kept, self.scored))
        left = [group.prompt.index for group in self.judged if group.prompt.index not in kept]
        return {index: GroupEnd.FILTERED if index in scored else GroupEnd.GIVEN_UP for index in left}


def trainable(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with only the samples that have a reward; groups left empty are gone."""
    kept = [_with_rewards(group) for group in groups]
    return [group for group in kept if group.samples]


def _with_rewards(group: Group) -> Group:
    samples = tuple(sample for sample in group.samples if sample.has_reward)
    return group if len(samples) == len(group.samples) else Group(group.prompt, samples)


class Screen:
    """The filter of a run, and what went through it since the last step was closed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tests = config.algorithm.filter or FilterSection()
        """The filter's tests, whose decisions are counted where a run keeps all groups too."""
        self._booked: list[Group] = []
        self._witnesses = Witnesses(config.reward)
        self._account = filtering.Account()
        self.dropped: dict[int, GroupEnd] = {}
        """How booked groups ended that are not trained on, by their prompts' indices, since `standing` told them."""

    @property
    def num_booked(self) -> int:
        """Groups since the last step was closed."""
        return len(self._booked)

    def newest_version(self) -> int:
        """Of their tokens; -1 without any."""
        return max((newest_version(group) for group in self._booked), default=-1)

    def look(self, groups: Sequence[Group]) -> Screened:
        """What judged groups are worth. BadNumbers for rewards that are no numbers."""
        nan_guard.check_finite_rewards(groups)
        scored = trainable(groups)
        decisions = filtering.keep(self._tests, [_values(group) for group in scored])
        return self._screened(groups, scored, decisions)

    def look_again(self, groups: Sequence[Group], decisions: list[filtering.Decision]) -> Screened:
        """Return what `look` found of groups that have rewards, given what it decided of each."""
        return self._screened(groups, trainable(groups), decisions)

    def _screened(
        self, groups: Sequence[Group], scored: list[Group], decisions: list[filtering.Decision]
    ) -> Screened:
        pairs, keeps_all = zip(scored, decisions, strict=True), self._config.algorithm.filter is None
        kept = [group for group, decision in pairs if keeps_all or decision is filtering.Decision.KEPT]
        return Screened(tuple(groups), scored, decisions, kept)

    def book(self, screened: Screened) -> None:
        """Counts groups, as they were judged, to the step that is closed next; with the filter's reason also where all are kept."""
        self._booked += screened.judged
        self.dropped |= screened.dropped()
        self._account.add(screened.decisions, [group.prompt.domain for group in screened.scored])

    def take_standing(self, on_the_way: Sequence[int], next_index: int) -> Standing:
        """Where a run's prompts are; what was dropped is told once."""
        dropped, self.dropped = self.dropped, {}
        filtered, given_up = (
            [index for index, end in dropped.items() if end is kind]
            for kind in (GroupEnd.FILTERED, GroupEnd.GIVEN_UP)
        )
        return Standing(on_the_way, next_index, filtered, given_up)

    def close(self, chosen: Sequence[Group], *, version: int, effort: str) -> dict[str, float]:
        """The metrics of the step that trains `version` on these groups; the next account begins.

        RewardError where too many of the booked samples have no verdict. `effort`: what was spent, for the warning where groups
        are missing.
        """
        judged = sorted(self._booked, key=lambda group: group.prompt.index)
        wanted, no_reward = self._config.loop.prompts_per_step, _no_reward(judged)
        metrics = (
            _statistics(judged)
            | alikeness(judged)
            | self._account.metrics()
            | {
                "group/short": float(wanted - len(chosen)),
                "reward/no_reward_frac": no_reward,
                "rollout/groups": float(len(chosen)),
            }
            | self._agreement(judged)
            | oldest(chosen, version)
        )
        self._check_budget(len(chosen), metrics, effort)
        self._check_rewards(no_reward)
        self._booked, self._account = [], filtering.Account()
        return metrics

    def _agreement(self, judged: Sequence[Group]) -> dict[str, float]:
        agreement, fallen = self._witnesses.look(judged)
        if fallen:
            log.error("%s: look at what the newest responses say, and try mrl rewards check", fallen)
        return agreement

    def _check_rewards(self, no_reward: float) -> None:
        limit = self._config.loop.max_no_reward_fraction
        if no_reward > limit:
            raise RewardError(
                f"{no_reward:.1%} of this step's samples have no reward, more than loop.max_no_reward_fraction = "
                f"{limit:.1%}; see the verifier's reasons in samples.jsonl and the log"
            )

    def _check_budget(self, num_groups: int, metrics: Mapping[str, float], effort: str) -> None:
        section, wanted = self._config.algorithm.filter, self._config.loop.prompts_per_step
        if num_groups == wanted or section is None:
            return
        text = (
            f"dynamic sampling found {num_groups} of {wanted} groups in {effort}; "
            f"{metrics.get('group/all_correct_frac', 0.0):.0%} of the groups were all right, {metrics.get('group/all_wrong_frac', 0.0):.0%} all wrong"
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
    scored = [s for s in samples if s.has_reward]
    counts = {"rollout/samples": float(len(samples)), **_routes(samples), **episode_metrics(samples)}
    if not scored:
        return counts
    rewards = np.array([s.verdict.value for s in scored if s.verdict is not None])
    lengths = np.array([s.num_policy_tokens for s in scored])
    ended = (Status.FINISHED, Status.TRUNCATED)
    others = [s.num_policy_tokens for s in samples if not s.has_reward and s.status in ended]
    if others:
        counts["reward/no_reward_length_ratio"] = float(np.mean(others) / max(lengths.mean(), 1e-9))
    high, low = rewards.max(), rewards.min()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/max": float(high),
        "reward/min": float(low),
        **_parts(scored),
        **_by_domain(scored),
        **counts,
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_p99": float(np.percentile(lengths, 99)),
        "rollout/truncated_frac": float(np.mean([s.status is Status.TRUNCATED for s in scored])),
        "rollout/aborted": float(sum(s.status is Status.ABORTED for s in samples)),
        "rollout/failed": float(sum(s.status is Status.FAILED for s in samples)),
        "reward/seconds_p99": float(np.percentile([s.verdict.seconds for s in scored if s.verdict], 99)),
    }


def _routes(samples: Sequence[Sample]) -> dict[str, float]:
    """Rows that engines did not record, where they were to record any; such a sample failed."""
    told = {s.sample_id: s.routes.missing for s in samples if s.routes is not None}
    if without := [name for name, missing in told.items() if missing]:
        log.warning("engines did not record all routes of samples %s, which failed", ", ".join(without))
    return {"routing/rows_missing": float(sum(told.values()))} if told else {}


def _parts(samples: Sequence[Any]) -> dict[str, float]:
    """Each part's mean over the samples that have it: a witness looks at some, and a domain has parts of its own."""
    names = sorted({name for s in samples for name in s.verdict.parts})
    having = {name: [s.verdict.parts[name] for s in samples if name in s.verdict.parts] for name in names}
    return {f"reward/{name}": float(np.mean(values)) for name, values in having.items()}


def _by_domain(samples: Sequence[Any]) -> dict[str, float]:
    names = sorted({s.domain for s in samples})
    if len(names) < 2:
        return {}
    return {
        f"reward/mean/{n}": float(np.mean([s.verdict.value for s in samples if s.domain == n])) for n in names
    }
