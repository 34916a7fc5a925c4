"""Rollout worker: runs groups' coroutines on the node of their engines, environments and reward workers.

| waits for | unblocked by |
|---|---|
| messages | the driver, whose end does not end this process: Ray does |
| groups | engines, environments, reward workers |

Judged groups are sent once per loop iteration; what open groups lack, every REPORT_SECONDS if it changed."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mrl.errors import MrlError
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engine_server import PULSE_SECONDS
from mrl.samples import Group
from mrl.trajectories import worker_messages
from mrl.trajectories.group import GroupInFlight, RolloutRunner
from mrl.trajectories.group_messages import GroupFields, group_fields
from mrl.trajectories.worker_messages import GroupProgress, GroupStart

REPORT_SECONDS = 0.25
MOST_DESCRIBED = 3
"""Number of open groups that a pulse describes."""


class RolloutWorker:
    """One rollout worker, without its connection to the driver. All methods belong to one event loop."""

    def __init__(
        self,
        runner: RolloutRunner,
        engines: EnginePool,
        send: Callable[[worker_messages.WorkerMessage], None],
    ) -> None:
        """`engines`: the runner's; `send`: sends a message to the driver."""
        self._runner, self._engines, self._send = runner, engines, send
        self._open: dict[int, GroupInFlight] = {}
        """Open groups, by number."""
        self._sent: dict[int, GroupProgress] = {}
        """Progress that was last sent to the driver, by group number."""
        self._done: list[tuple[int, GroupFields]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def report(self) -> None:
        """Start to send pulses and progress."""
        self._task(self._pulse())
        self._task(self._report())

    def begin(self, groups: Sequence[GroupStart]) -> None:
        """Start groups, all in one loop iteration, so that first requests leave in one message per engine."""
        for start in groups:
            sampling, prompt = start.sampling, start.prompt
            if start.lengths is not None:
                fixed = functools.partial(_length_of, start.lengths)
                sampling = dataclasses.replace(sampling, lengths=fixed)
            if start.engine >= 0:
                self._engines.prefer(prompt.index, start.engine)
            group = self._open[start.number] = self._runner.start(prompt, sampling, start.records)
            group.task.add_done_callback(functools.partial(self._ended, start.number, group))

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget groups, which are made elsewhere, or here again."""
        for number in numbers:
            if (group := self._forget(number)) is not None:
                self._runner.drop(group)

    def heard(self, message: worker_messages.WorkerMessage) -> None:
        """Handle a message of the driver."""
        match message:
            case worker_messages.ConnectEngine():
                self._task(self._connect(message))
            case worker_messages.GiveUpEngine():
                self._engines.give_up(message.engine, message.why)
            case worker_messages.PauseRollouts():
                self._task(self._pause(message.snapshot))
            case worker_messages.ResumeRollouts():
                self._engines.resume(training=message.training)
            case _:
                raise ValueError(f"the driver sent an unexpected {type(message).__name__}")

    def engine_gone(self, engine: int, why: str, kind: str) -> None:
        """Report that an engine's connection ended (`EnginePool`, on_lost)."""
        self._send(worker_messages.EngineGone(engine, why, kind))

    def failed(self, error: BaseException) -> None:
        """Report the error that ends the run."""
        kind = type(error).__name__ if isinstance(error, MrlError) else ""
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        self._send(worker_messages.WorkerFailure(kind, text))

    async def _connect(self, message: worker_messages.ConnectEngine) -> None:
        await self._engines.connect(message.engine, (message.host, message.port))
        self._send(worker_messages.EngineConnected(message.engine))

    async def _pause(self, snapshot: bool) -> None:
        interrupted = await self._engines.pause(snapshot=snapshot)
        self._send_done()
        self._send_progress()
        self._engines.newest_version = -1
        groups = []
        if snapshot:
            saved = ((number, self._runner.saved(group)) for number, group in self._open.items())
            groups = [(number, group_fields(group.prompt, group.samples)) for number, group in saved]
        self._send(worker_messages.RolloutsPaused(interrupted.num_requests, interrupted.num_tokens, groups))

    # -- groups ----------------------------------------------------------------------------------------------

    def _forget(self, number: int) -> GroupInFlight | None:
        """Remove and return the open group of this number, if any."""
        self._sent.pop(number, None)
        if (group := self._open.pop(number, None)) is not None:
            self._engines.forget(group.prompt.index)
        return group

    def _ended(self, number: int, group: GroupInFlight, task: asyncio.Task[Group]) -> None:
        if self._open.get(number) is group:  # otherwise it was dropped, and may have been started again
            self._forget(number)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.failed(error)
            return
        if not self._done:
            asyncio.get_running_loop().call_soon(self._send_done)
        self._done.append((number, group_fields(group.prompt, task.result().samples)))

    def _send_done(self) -> None:
        done, self._done = self._done, []
        if done:
            self._send(worker_messages.GroupsDone(self._engines.newest_version, done))

    def _send_progress(self) -> None:
        changed = []
        for number, group in self._open.items():
            progress = GroupProgress(
                number,
                [trajectory.number for trajectory in group.trajectories if trajectory.sample is None],
                [trajectory.number for trajectory in group.trajectories if trajectory.verdict is None],
                group.waits_for_environments,
            )
            if self._sent.get(number) != progress:
                self._sent[number] = progress
                changed.append(progress)
        if changed:
            self._send(worker_messages.GroupsProgress(self._engines.newest_version, changed))

    async def _report(self) -> None:
        num_come = -1
        while True:
            num_come = await self._runner.wait_beyond(num_come)
            self._send_progress()
            await asyncio.sleep(REPORT_SECONDS)

    async def _pulse(self) -> None:
        while True:
            self._send_progress()
            oldest = sorted(self._open.items(), key=lambda item: item[1].prompt.index)[:MOST_DESCRIBED]
            lacks = {number: self._runner.late(group) for number, group in oldest}
            pool = self._engines
            self._send(worker_messages.WorkerPulse(pool.silent_seconds(), pool.num_started_over, lacks))
            await asyncio.sleep(PULSE_SECONDS)

    def _task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)


def _length_of(lengths: Sequence[int], prompt: int, sample: int) -> int:
    return lengths[sample]
