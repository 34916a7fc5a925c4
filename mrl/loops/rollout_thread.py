"""Generation as a schedule sees it: an event loop in its own thread, and blocking calls into it.

| concurrent loop | consumes | waits for | unblocked by |
|---|---|---|---|
| engine thread, one per engine process (engine_loop.py) | requests, commands | work | a frame, a Ray call |
| a task per group (group.py) | a prompt | responses, verdicts | engines, environments, reward workers |
| `RolloutBuffer` (rollout_buffer.py; of a stream) | prompts | a free place | `commit`, a filtered group |
| the schedule's thread, in these calls | groups | groups, engines that pause | the tasks above |

Every wait has a deadline and names its phase and what is missing. The next call raises the loop's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mrl.agents.environment_client import EnvironmentClient, Environments
from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.errors import MrlError, RewardError, RolloutError
from mrl.loops.event_thread import EventThread
from mrl.loops.rollout_buffer import RolloutBuffer, StepGroups
from mrl.observe.ledger_log import InFlightPrompts
from mrl.observe.phases import PhaseClock
from mrl.rollout.engine_client import Address
from mrl.rollout.engine_pool import EngineControl, EnginePool, Engines, PauseTotals
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt
from mrl.trajectories.group import GroupInFlight, GroupMaker, RolloutRunner, RulesOf
from mrl.trajectories.remote_rollouts import WorkerEngines
from mrl.trajectories.rewards import RewardClient, RewardWorkers

MAX_IN_FLIGHT = 4096
"""Most samples that `generate_in_order` keeps in flight: more than engines generate concurrently."""


class RolloutThread(EventThread):
    """Rollouts of a run. The engines are paused until `resume`, and again from `pause` on."""

    engines: EngineControl
    """Control of the engines; its methods belong to the thread."""
    _rollouts: GroupMaker

    def __init__(
        self, rollouts: Callable[[RolloutThread], GroupMaker], clock: PhaseClock, *, deadline_seconds: float
    ) -> None:
        """Start the thread.

        Args:
            rollouts: Builds the GroupMaker in the thread, given this (`in_this_process`, remote_rollouts.py).
            clock: Counts the waiting time.
            deadline_seconds: Longest wait for all responses of a round, and then for all verdicts; of
                `generate_in_order`, from one arrival to the next.
        """
        super().__init__("rollouts", clock)
        self._deadline_seconds = deadline_seconds
        self._lost: dict[int, tuple[str, str]] = {}
        self._runs = self._trains = self._has_snapshot = False
        self._buffer: RolloutBuffer | None = None

        async def build() -> None:
            self._rollouts = rollouts(self)
            self.engines = self._rollouts.engines

        self.do(build())

    # -- rounds: on_policy, validation, commands -------------------------------------------------------------

    def groups(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return all prompts' groups with verdicts, in order; samples without a reward are included."""
        with self.clock.phase("generate"):
            opened = self.ask(lambda: self._rollouts.start_all(prompts, sampling, on_failure=self.fail))
            self.do(_all_answered(opened), self._deadline_seconds, lambda: self._late(opened))
        with self.clock.phase("reward"):
            return self.do(_all_judged(opened), self._deadline_seconds, lambda: self._late(opened))

    def generate_in_order(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Group]:
        """Yield the groups that `groups` would return, each once it and all before it are complete. `prompts`
        may be of any length: it is read while fewer than AT_ONCE samples are in flight."""
        waiting, opened, num_come = iter(prompts), deque[GroupInFlight](), -1

        def late() -> MrlError:
            return self._late(opened)

        def start(prompts: Sequence[Prompt]) -> list[GroupInFlight]:
            return self.ask(lambda: self._rollouts.start_all(prompts, sampling, on_failure=self.fail))

        while True:
            room = (MAX_IN_FLIGHT - sum(group.num_unjudged for group in opened)) // sampling.num_samples
            batch = list(itertools.islice(waiting, max(room, 0 if opened else 1)))
            if batch:
                opened += start(batch)
            if not opened:
                return
            num_come = self.do(self._rollouts.wait_beyond(num_come), self._deadline_seconds, late)
            while opened and opened[0].task.done():
                yield opened.popleft().task.result()

    def _late(self, groups: Iterable[GroupInFlight]) -> MrlError:
        groups = list(groups)
        responses, verdicts = self._rollouts.missing(groups)
        error, kind, phase = (
            (RolloutError, "responses", "generate") if responses else (RewardError, "verdicts", "reward")
        )
        missing = responses or verdicts
        return error(
            f"{len(missing)} {kind} of {len(groups)} prompts (first: {missing[:3]}) did not arrive within "
            f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s in phase {phase}"
        )

    # -- a stream --------------------------------------------------------------------------------------------

    def open_buffer(self, config: Config, prompts: PromptStream, sampling: Sampling) -> None:
        """Open the rollout buffer, which keeps groups in flight from the first `resume` on."""

        async def build() -> None:
            self._buffer = RolloutBuffer(config, prompts, self._rollouts, sampling, on_failure=self.fail)

        self.do(build())

    @property
    def buffer(self) -> RolloutBuffer:
        """Rollout buffer, whose methods belong to the thread (`ask`)."""
        assert self._buffer is not None, "only a stream has a buffer"
        return self._buffer

    def take(self, version: int, seconds: float) -> StepGroups | None:
        """Return the next groups, for the step that trains `version`; None if not ready in `seconds`."""

        async def taken() -> StepGroups | None:
            buffer = self.buffer
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while (batch := buffer.take(version)) is None:
                        buffer.changed.clear()
                        await buffer.changed.wait()
                    return batch
            return None

        return self.do(taken())

    def commit(self, version: int) -> None:
        """Note that the engines serve `version`, and release the places of the groups trained into it."""
        self.ask(lambda: self.buffer.commit(version))

    def sync_due(self, *, shared: bool) -> bool:
        """Return `RolloutBuffer.sync_due`."""
        return self.ask(lambda: self.buffer.sync_due(shared=shared))

    def waiting_for(self) -> str:
        """Describe what a stream waits for, for messages."""
        return self.buffer.waiting_for()

    def take_standing(self) -> InFlightPrompts:
        """Return where a stream's prompts are."""
        return self.ask(lambda: self.buffer.take_standing())

    def state(self) -> dict[str, Any]:
        """Return a stream's position, groups and trajectories; call it while paused with a snapshot."""
        assert not self._runs, "a checkpoint cannot contain tokens that running engines have"
        return self.ask(lambda: self.buffer.state())

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Continue a stream from `state`; return how many groups with lost weights are generated again."""
        return self.ask(lambda: self.buffer.restore(state, version=version))

    # -- engines ---------------------------------------------------------------------------------------------

    def resume(self, *, training: bool = True) -> None:
        """Let the engines step, and a stream admit prompts; `training` False: only validation requests."""
        if self._runs and training == self._trains:
            return
        self._runs, self._trains = True, training

        def resume() -> None:
            if training:
                self.engines.newest_version = -1
            self.engines.resume(training=training)
            if training and self._buffer is not None:
                self._buffer.resume()

        self.ask(resume)

    def pause(self, *, snapshot: bool = False) -> PauseTotals:
        """Pause the engines at a token boundary until `resume`. `snapshot`: fetch the partial rollouts, for
        `state` and for engines that are lost."""
        if not self._runs and (self._has_snapshot or not snapshot):
            return PauseTotals()

        async def pause() -> PauseTotals:
            if self._buffer is not None:
                self._buffer.stop()
            return await self.engines.pause(snapshot=snapshot)

        interrupted = self.do(pause())
        self._runs, self._has_snapshot = False, snapshot
        return interrupted

    @property
    def is_stranded(self) -> bool:
        """True if requests wait and no engine serves: only a weight sync brings one in."""
        return self.engines.is_stranded

    def connect(self, number: int, address: Address) -> None:
        """Connect a paused engine."""
        self.do(self._pool.connect(number, address))

    def resume_engines(self) -> None:
        """Let every connected engine step, also those that came while the others did."""
        self.ask(lambda: self.engines.resume(training=self._trains))

    def close(self) -> None:
        """End all tasks and the threads."""
        super().close()
        self._rollouts.close()

    def give_up(self, number: int, why: str) -> None:
        """Generate an engine's requests elsewhere."""
        self.ask(lambda: self._pool.give_up(number, why))

    def take_lost(self) -> dict[int, tuple[str, str]]:
        """Return, once, the engines whose connections ended: (why, class name of their error)."""
        lost, self._lost = self._lost, {}
        return lost

    def note_lost(self, number: int, why: str, kind: str) -> None:
        """Note for `take_lost` that an engine's connection ended; called in the thread."""
        self._lost[number] = why, kind

    def late(self, seconds: float) -> list[int]:
        """Return the engines that have requests and made no step for `seconds`."""
        return self._pool.late(seconds)

    @property
    def num_started_over(self) -> int:
        """Number of requests that were generated again elsewhere."""
        return self._pool.num_started_over

    @property
    def _pool(self) -> EnginePool | WorkerEngines:
        pool = self.engines
        assert isinstance(pool, EnginePool | WorkerEngines), "only engines in processes are connected"
        return pool


def in_this_process[Thread: EventThread](
    engines: Callable[[Thread], Engines],
    rewards: RewardWorkers,
    *,
    run_seed: int,
    environments: Environments | None = None,
    rules_of: RulesOf = lambda domain: None,
    max_environments: int | None = None,
) -> Callable[[Thread], RolloutRunner]:
    """Return a builder of group makers in a thread of this process: a RolloutThread's, or a rollout worker's.

    Args:
        engines: Builds the engines, in and given the thread.
        environments, rules_of, max_environments: Environments, rules per domain, limit of open episodes.
    """

    def make(thread: Thread) -> RolloutRunner:
        client = (
            None
            if environments is None
            else EnvironmentClient(environments, max_environments=max_environments)
        )
        return RolloutRunner(
            engines(thread),
            RewardClient(rewards, on_failure=thread.fail),
            run_seed=run_seed,
            environments=client,
            rules_of=rules_of,
            max_environments=max_environments,
        )

    return make


async def _all_answered(groups: Sequence[GroupInFlight]) -> None:
    for group in groups:
        await group.completed.wait()


async def _all_judged(groups: Sequence[GroupInFlight]) -> list[Group]:
    return [await group.task for group in groups]
