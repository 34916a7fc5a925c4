"""The group of a prompt: its trajectories rolled out and judged side by side, as one task."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Sequence

from mrl.agents.environment_client import EnvironmentClient
from mrl.rollout.engine_pool import EngineControl, Engines
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample
from mrl.trajectories.environment_rollout import Rules, environment_rollout
from mrl.trajectories.rewards import RewardClient
from mrl.trajectories.single_turn import single_turn
from mrl.trajectories.trajectory import ENGINE, ENVIRONMENT, IN_LINE, Trajectory

RulesOf = Callable[[str], Rules | None]
"""The rules of a domain's episodes; None if a response is all there is."""


class OpenGroup:
    """A group on its way."""

    def __init__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        self.prompt, self.trajectories = prompt, trajectories
        self.num_unanswered = sum(each.sample is None for each in trajectories)
        """Number of samples without a response."""
        self.task: asyncio.Task[Group]
        self.answered = asyncio.Event()
        """Set once every sample has a response."""

    @property
    def num_unjudged(self) -> int:
        """Return the number of samples without a verdict."""
        return sum(each.verdict is None for each in self.trajectories)

    @property
    def waits_for_environments(self) -> bool:
        """Return True if nothing but environments has to answer before all responses are there."""
        unanswered = [each for each in self.trajectories if each.sample is None]
        return all(each.waits_for != ENGINE for each in unanswered)


class GroupMaker(abc.ABC):
    """How the groups of a run are made: in this process (`RolloutRunner`), or in rollout workers
    (remote_rollouts.py). All methods belong to one event loop."""

    engines: EngineControl

    def __init__(self) -> None:
        self.num_come = 0
        """Responses, verdicts and whole groups so far."""
        self.come = asyncio.Event()
        """Set with each of them."""

    @abc.abstractmethod
    def start(self, prompt: Prompt, sampling: Sampling, records: Iterable[Sample] = ()) -> OpenGroup:
        """Start a group, from the samples that `saved` returned of it, if any."""

    @abc.abstractmethod
    def saved(self, group: OpenGroup) -> Group:
        """Return what a checkpoint keeps of a group, while engines are paused; a sample that has not begun
        is not in it."""

    @abc.abstractmethod
    def missing(self, groups: Iterable[OpenGroup]) -> tuple[list[str], list[str]]:
        """Return (the samples without a response and where they are, the samples without a verdict), for
        people."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what is not the event loop's, after that has ended."""

    def start_all(
        self, prompts: Iterable[Prompt], sampling: Sampling, *, on_failure: Callable[[BaseException], None]
    ) -> list[OpenGroup]:
        """Start groups; `on_failure` is called with what one raises."""

        def ended(task: asyncio.Task[Group]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_failure(error)
            self.note()

        groups = [self.start(prompt, sampling) for prompt in prompts]
        for group in groups:
            group.task.add_done_callback(ended)
        return groups

    async def more_than(self, before: int) -> int:
        """Return `num_come` once it is not `before`."""
        while self.num_come == before:
            self.come.clear()
            await self.come.wait()
        return self.num_come

    def note(self) -> None:
        """Note that something has come."""
        self.num_come += 1
        self.come.set()

    def late(self, group: OpenGroup) -> str:
        """Return what a group lacks, by its first samples, for people."""
        unanswered, unjudged = self.missing([group])
        return (
            f"{len(unanswered)} responses missing{_first(unanswered)}, {len(unjudged)} verdicts missing"
            f"{_first(unjudged)}"
        )


class RolloutRunner(GroupMaker):
    """Makes groups in this process: engines, environments and reward workers."""

    engines: Engines

    def __init__(
        self,
        engines: Engines,
        rewards: RewardClient,
        *,
        run_seed: int,
        environments: EnvironmentClient | None = None,
        rules_of: RulesOf = lambda domain: None,
        max_open: int | None = None,
    ) -> None:
        """`rules_of` a domain whose samples are episodes, in `environments`; `max_open` of them, for
        messages."""
        super().__init__()
        self.engines, self._rewards = engines, rewards
        self._run_seed, self._environments, self._rules_of = run_seed, environments, rules_of
        self._max_open = max_open

    def start(self, prompt: Prompt, sampling: Sampling, records: Iterable[Sample] = ()) -> OpenGroup:
        of = {record.sample_index: record for record in records}
        trajectories = [
            Trajectory.of(prompt, number, of.get(number)) for number in range(sampling.num_samples)
        ]
        group = OpenGroup(prompt, trajectories)
        group.task = asyncio.get_running_loop().create_task(self._run_group(group, sampling))
        return group

    def drop(self, group: OpenGroup) -> None:
        """Forget a group, which is made elsewhere."""
        group.task.cancel()
        self._rewards.flush(group.prompt.index)

    async def _run_group(self, group: OpenGroup, sampling: Sampling) -> Group:
        """Make all samples of a group and have them judged."""

        async def one(trajectory: Trajectory) -> Sample:
            if trajectory.sample is None:
                await self._rollout(trajectory, sampling)
                group.num_unanswered -= 1
                self.note()
            if trajectory.verdict is None:
                assert trajectory.sample is not None, "a rollout ends with a sample"
                verdict = self._rewards.score(trajectory.sample, group.prompt)
                if not group.num_unanswered:  # group verifiers may get fewer samples than they wait for
                    self._rewards.flush(group.prompt.index)
                    group.answered.set()
                trajectory.verdict = await verdict
                self.note()
            return trajectory.judged()

        return Group(group.prompt, tuple(await asyncio.gather(*map(one, group.trajectories))))

    async def _rollout(self, trajectory: Trajectory, sampling: Sampling) -> None:
        asked, rules = (
            sampling.request(trajectory.prompt, trajectory.number),
            self._rules_of(trajectory.prompt.domain),
        )
        if rules is None:
            await single_turn(self.engines, trajectory, asked)
        else:
            assert self._environments is not None, "only with environments"
            await environment_rollout(
                self.engines, self._environments, rules, trajectory, asked, self._run_seed
            )

    def close(self) -> None:
        self._rewards.close()

    # -- what there is -------------------------------------------------------------------------------------------

    def saved(self, group: OpenGroup) -> Group:
        samples = (each.saved(self.engines.so_far(each.name)) for each in group.trajectories)
        return Group(group.prompt, tuple(sample for sample in samples if sample is not None))

    def missing(self, groups: Iterable[OpenGroup]) -> tuple[list[str], list[str]]:
        trajectories = [each for group in groups for each in group.trajectories]
        unanswered = [self._where(each) for each in trajectories if each.sample is None]
        return unanswered, [each.name for each in trajectories if each.verdict is None]

    def _where(self, trajectory: Trajectory) -> str:
        name = trajectory.name
        if trajectory.waits_for == IN_LINE:
            return f"{name} in line for an environment (agent.max_open = {self._max_open})"
        engine = self.engines.where(name)
        if trajectory.episode is not None:
            place = "waiting for its environment" if trajectory.waits_for == ENVIRONMENT else engine
            return f"{name} at turn {len(trajectory.episode.turns)}, {place}"
        so_far = self.engines.so_far(name)
        return f"{name} {engine}" + (f" after {len(so_far.tokens)} tokens" if so_far else "")


def _first(names: Sequence[str]) -> str:
    return f" (first: {'; '.join(names[:3])})" if names else ""
