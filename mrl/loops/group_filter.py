"""Select the judged groups worth training on, and account for all of them in the step's row."""

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
from mrl.loops.audit_agreement import AuditAgreement
from mrl.loops.episode_metrics import episode_metrics
from mrl.loops.response_similarity import response_similarity
from mrl.loops.staleness import largest_staleness, newest_version
from mrl.observe.ledger_log import InFlightPrompts
from mrl.pool.ledger import GroupEnd
from mrl.samples import Group, Sample, Status, VerdictKind

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class FilteredGroups:
    """Judged groups, and those of them that are worth training on."""

    judged: tuple[Group, ...]
    """With all their samples."""
    scored: list[Group]
    """With only the samples that have a reward; groups left empty are removed."""
    decisions: list[filtering.Decision]
    """Decision on each scored group, even if the run has no filter."""
    kept: list[Group]
    """Scored groups that the run's filter keeps."""

    def dropped(self) -> dict[int, GroupEnd]:
        """Return how the groups that are not kept end, by prompt index."""
        kept, scored = ({group.prompt.index for group in groups} for groups in (self.kept, self.scored))
        left = [group.prompt.index for group in self.judged if group.prompt.index not in kept]
        return {index: GroupEnd.FILTERED if index in scored else GroupEnd.GIVEN_UP for index in left}


def trainable(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with only the samples that have a reward; groups left empty are removed."""
    kept = [_with_rewards(group) for group in groups]
    return [group for group in kept if group.samples]


def _with_rewards(group: Group) -> Group:
    samples = tuple(sample for sample in group.samples if sample.has_reward)
    return group if len(samples) == len(group.samples) else Group(group.prompt, samples)


class GroupFilter:
    """Filter of a run, and the groups that went through it since the last step was closed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tests = config.algorithm.filter or FilterSection()
        """Filter whose decisions are counted even if the run keeps all groups."""
        distillation = config.algorithm.distillation
        self._taught = frozenset(distillation.teachers if distillation else ())
        """Domains with a teacher: their groups are kept, as they teach something whatever their rewards."""
        self._booked: list[Group] = []
        self._witnesses = AuditAgreement(config.reward)
        self._account = filtering.DecisionCounts()
        self.dropped: dict[int, GroupEnd] = {}
        """How booked groups that are not trained on ended, by prompt index, since the last report."""

    @property
    def num_booked(self) -> int:
        """Number of groups booked since the last step was closed."""
        return len(self._booked)

    def newest_version(self) -> int:
        """Return the newest version of the booked groups' tokens; -1 without any."""
        return max((newest_version(group) for group in self._booked), default=-1)

    def filter(self, groups: Sequence[Group]) -> FilteredGroups:
        """Decide which judged groups are kept. Raise BadNumbers if a reward is not a finite number."""
        nan_guard.check_finite_rewards(groups)
        scored = trainable(groups)
        decisions = filtering.decide(self._tests, [_values(group) for group in scored])
        for number, group in enumerate(scored):
            if group.prompt.domain in self._taught:
                decisions[number] = filtering.Decision.KEPT
        return self._screened(groups, scored, decisions)

    def refilter(self, groups: Sequence[Group], decisions: list[filtering.Decision]) -> FilteredGroups:
        """Return what `filter` returned for groups that have rewards, given its decisions."""
        return self._screened(groups, trainable(groups), decisions)

    def _screened(
        self, groups: Sequence[Group], scored: list[Group], decisions: list[filtering.Decision]
    ) -> FilteredGroups:
        pairs, keeps_all = zip(scored, decisions, strict=True), self._config.algorithm.filter is None
        kept = [group for group, decision in pairs if keeps_all or decision is filtering.Decision.KEPT]
        return FilteredGroups(tuple(groups), scored, decisions, kept)

    def book(self, screened: FilteredGroups) -> None:
        """Count judged groups to the next closed step, with the filter's reason even if all are kept."""
        self._booked += screened.judged
        self.dropped |= screened.dropped()
        self._account.add(screened.decisions, [group.prompt.domain for group in screened.scored])

    def take_standing(self, on_the_way: Sequence[int], next_index: int) -> InFlightPrompts:
        """Return where a run's prompts are; dropped prompts are reported once."""
        dropped, self.dropped = self.dropped, {}
        filtered, given_up = (
            [index for index, end in dropped.items() if end is kind]
            for kind in (GroupEnd.FILTERED, GroupEnd.GIVEN_UP)
        )
        return InFlightPrompts(on_the_way, next_index, filtered, given_up)

    def finish_step(self, chosen: Sequence[Group], *, version: int, effort: str) -> dict[str, float]:
        """Return the metrics of the step that trains `version` on these groups, and start the next account.

        Raise RewardError if too many booked samples have no verdict. `effort`: what was
        spent, for the warning if groups are missing."""
        judged = sorted(self._booked, key=lambda group: group.prompt.index)
        wanted, no_reward = self._config.loop.prompts_per_step, _no_reward(judged)
        metrics = (
            _statistics(judged)
            | response_similarity(judged)
            | self._account.metrics()
            | {
                "group/short": float(wanted - len(chosen)),
                "reward/no_reward_frac": no_reward,
                "rollout/groups": float(len(chosen)),
            }
            | self._agreement(judged)
            | largest_staleness(chosen, version)
        )
        self._check_budget(len(chosen), metrics, effort)
        self._check_rewards(no_reward)
        self._booked, self._account = [], filtering.DecisionCounts()
        return metrics

    def _agreement(self, judged: Sequence[Group]) -> dict[str, float]:
        agreement, warning = self._witnesses.look(judged)
        if warning:
            log.error("%s: read the newest responses and try mrl rewards check", warning)
        return agreement

    def _check_rewards(self, no_reward: float) -> None:
        limit = self._config.loop.max_no_reward_fraction
        if no_reward > limit:
            raise RewardError(
                f"{no_reward:.1%} of this step's samples have no reward, more than "
                f"loop.max_no_reward_fraction = {limit:.1%}; see the verifier's reasons in samples.jsonl and "
                "the log"
            )

    def _check_budget(self, num_groups: int, metrics: Mapping[str, float], effort: str) -> None:
        section, wanted = self._config.algorithm.filter, self._config.loop.prompts_per_step
        if num_groups == wanted or section is None:
            return
        text = (
            f"dynamic sampling found {num_groups} of {wanted} groups in {effort}; "
            f"{metrics.get('group/all_correct_frac', 0.0):.0%} of groups all correct, "
            f"{metrics.get('group/all_incorrect_frac', 0.0):.0%} all incorrect"
        )
        log.warning("%s; training on fewer", text)


def _no_reward(groups: Sequence[Group]) -> float:
    samples = [s for g in groups for s in g.samples]
    no_reward = sum(s.verdict is None or s.verdict.kind is VerdictKind.NO_REWARD for s in samples)
    return no_reward / max(1, len(samples))


def _values(group: Group) -> np.ndarray:
    return np.array([s.verdict.value for s in group.samples if s.verdict is not None], dtype=np.float64)


def _statistics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of rewards and lengths of the step's scored samples, before filtering."""
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
    """Count the route rows that engines failed to record; such a sample has failed."""
    missing_rows = {s.sample_id: s.routes.missing for s in samples if s.routes is not None}
    if incomplete := [name for name, missing in missing_rows.items() if missing]:
        log.warning("engines did not record all routes of samples %s, which failed", ", ".join(incomplete))
    return {"routing/rows_missing": float(sum(missing_rows.values()))} if missing_rows else {}


def _parts(samples: Sequence[Any]) -> dict[str, float]:
    """Return each part's mean over the samples that have it: parts depend on domain and audit share."""
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
