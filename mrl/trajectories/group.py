"""Group of a prompt: its trajectories, rolled out and judged concurrently in one task."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Sequence

from mrl.agents.environment_client import EnvironmentClient
from mrl.gateway.server import Gateway
from mrl.rollout.engine_pool import EngineControl, Engines
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample
from mrl.trajectories.environment_rollout import EpisodeRules, environment_rollout
from mrl.trajectories.program_rollout import ProgramRules, program_rollout
from mrl.trajectories.rewards import RewardClient
from mrl.trajectories.single_turn import single_turn
from mrl.trajectories.trajectory import ENGINE, ENVIRONMENT, IN_LINE, Trajectory

RulesOf = Callable[[str], EpisodeRules | ProgramRules | None]
"""Rules of a domain's episodes or programs; None if a sample is a single response."""


class GroupInFlight:
    """A group in flight."""

    def __init__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        self.prompt, self.trajectories = prompt, trajectories
        self.num_incomplete = sum(trajectory.sample is None for trajectory in trajectories)
        """Number of samples without a response."""
        self.task: asyncio.Task[Group]
        self.completed = asyncio.Event()
        """Set once every sample has a response."""

    @property
    def num_unjudged(self) -> int:
        """Number of samples without a verdict."""
        return sum(trajectory.verdict is None for trajectory in self.trajectories)

    @property
    def waits_for_environments(self) -> bool:
        """True if all missing responses wait for environments, none for an engine."""
        unanswered = [trajectory for trajectory in self.trajectories if trajectory.sample is None]
        return all(trajectory.waits_for != ENGINE for trajectory in unanswered)


class GroupMaker(abc.ABC):
    """Maker of a run's groups: in this process (`RolloutRunner`), or in rollout workers (remote_rollouts.py).
    All methods belong to one event loop."""

    engines: EngineControl

    def __init__(self) -> None:
        self.num_arrivals = 0
        """Responses, verdicts and complete groups so far."""
        self.come = asyncio.Event()
        """Set with each arrival."""

    @abc.abstractmethod
    def start(self, prompt: Prompt, sampling: Sampling, records: Iterable[Sample] = ()) -> GroupInFlight:
        """Start a group, from the samples that `saved` returned, if any."""

    @abc.abstractmethod
    def saved(self, group: GroupInFlight) -> Group:
        """Return what a checkpoint keeps of a group: all samples that have begun. Engines are paused."""

    @abc.abstractmethod
    def missing(self, groups: Iterable[GroupInFlight]) -> tuple[list[str], list[str]]:
        """Return (samples without a response and where they are, samples without a verdict), for messages."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close what does not belong to the event loop, after the loop has ended."""

    def start_all(
        self, prompts: Iterable[Prompt], sampling: Sampling, *, on_failure: Callable[[BaseException], None]
    ) -> list[GroupInFlight]:
        """Start groups; `on_failure` is called with a group's exception."""

        def ended(task: asyncio.Task[Group]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_failure(error)
            self.note()

        groups = [self.start(prompt, sampling) for prompt in prompts]
        for group in groups:
            group.task.add_done_callback(ended)
        return groups

    async def wait_beyond(self, before: int) -> int:
        """Wait until `num_arrivals` is not `before`; return it."""
        while self.num_arrivals == before:
            self.come.clear()
            await self.come.wait()
        return self.num_arrivals

    def note(self) -> None:
        """Count one more arrival."""
        self.num_arrivals += 1
        self.come.set()

    def late(self, group: GroupInFlight) -> str:
        """Describe what a group lacks, by its first samples."""
        unanswered, unjudged = self.missing([group])
        return (
            f"{len(unanswered)} responses missing{_first(unanswered)}, {len(unjudged)} verdicts missing"
            f"{_first(unjudged)}"
        )


class RolloutRunner(GroupMaker):
    """Maker of groups in this process, with engines, environments and reward workers."""

    engines: Engines

    def __init__(
        self,
        engines: Engines,
        rewards: RewardClient,
        *,
        run_seed: int,
        environments: EnvironmentClient | None = None,
        rules_of: RulesOf = lambda domain: None,
        max_environments: int | None = None,
    ) -> None:
        """`rules_of`: rules of a domain's episodes; `max_environments`: limit that messages name."""
        super().__init__()
        self.engines, self._rewards = engines, rewards
        self._run_seed, self._environments, self._rules_of = run_seed, environments, rules_of
        self._max_open = max_environments
        self._gateway = Gateway()

    def start(self, prompt: Prompt, sampling: Sampling, records: Iterable[Sample] = ()) -> GroupInFlight:
        of = {record.sample_index: record for record in records}
        trajectories = [
            Trajectory.of(prompt, number, of.get(number)) for number in range(sampling.num_samples)
        ]
        group = GroupInFlight(prompt, trajectories)
        group.task = asyncio.get_running_loop().create_task(self._run_group(group, sampling))
        return group

    def drop(self, group: GroupInFlight) -> None:
        """Forget a group, which is made elsewhere."""
        group.task.cancel()
        self._rewards.flush(group.prompt.index)

    async def _run_group(self, group: GroupInFlight, sampling: Sampling) -> Group:

        async def make_sample(trajectory: Trajectory) -> Sample:
            if trajectory.sample is None:
                await self._rollout(trajectory, sampling)
                group.num_incomplete -= 1
                self.note()
            if trajectory.verdict is None:
                assert trajectory.sample is not None, "a rollout ends with a sample"
                verdict = self._rewards.score(trajectory.sample, group.prompt)
                if not group.num_incomplete:  # group verifiers may get fewer samples than they expect
                    self._rewards.flush(group.prompt.index)
                    group.completed.set()
                trajectory.verdict = await verdict
                self.note()
            return trajectory.judged()

        return Group(group.prompt, tuple(await asyncio.gather(*map(make_sample, group.trajectories))))

    async def _rollout(self, trajectory: Trajectory, sampling: Sampling) -> None:
        request, rules = (
            sampling.request(trajectory.prompt, trajectory.number),
            self._rules_of(trajectory.prompt.domain),
        )
        if rules is None:
            await single_turn(self.engines, trajectory, request)
            return
        assert self._environments is not None, "only with environments"
        if isinstance(rules, EpisodeRules):
            await environment_rollout(
                self.engines, self._environments, rules, trajectory, request, self._run_seed
            )
        else:
            await program_rollout(
                self.engines, self._environments, self._gateway, rules, trajectory, request, self._run_seed
            )

    def close(self) -> None:
        self._rewards.close()

    # -- reports ---------------------------------------------------------------------------------------------

    def saved(self, group: GroupInFlight) -> Group:
        samples = (one.saved(self.engines.so_far(one.name)) for one in group.trajectories)
        return Group(group.prompt, tuple(sample for sample in samples if sample is not None))

    def missing(self, groups: Iterable[GroupInFlight]) -> tuple[list[str], list[str]]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        unanswered = [self._where(trajectory) for trajectory in trajectories if trajectory.sample is None]
        return unanswered, [trajectory.name for trajectory in trajectories if trajectory.verdict is None]

    def _where(self, trajectory: Trajectory) -> str:
        name = trajectory.name
        if trajectory.waits_for == IN_LINE:
            return f"{name} waiting for a free environment (agent.max_environments = {self._max_open})"
        if trajectory.is_program and trajectory.waits_for == ENVIRONMENT:
            return f"{name} in its program"
        engine = self.engines.where(name)
        if trajectory.episode is not None:
            place = "waiting for its environment" if trajectory.waits_for == ENVIRONMENT else engine
            return f"{name} at turn {len(trajectory.episode.turns)}, {place}"
        so_far = self.engines.so_far(name)
        return f"{name} {engine}" + (f" after {len(so_far.tokens)} tokens" if so_far else "")


def _first(names: Sequence[str]) -> str:
    return f" (first: {'; '.join(names[:3])})" if names else ""
