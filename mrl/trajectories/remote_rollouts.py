"""Driver's end of groups that rollout workers make: a worker has its node's engines and runs the coroutines.

| waits for | unblocked by |
|---|---|
| a worker that has an engine, for each group | an engine that is connected, a worker that is up |
| a group's samples and verdicts | `GroupsDone` of its worker, or the worker's loss |
| a pause | `RolloutsPaused` of each worker; of a lost one, its engines' report that they have paused |

A worker is lost if its connection ends or it is silent for too long: its groups restart elsewhere from the
last snapshot, and another process replaces it. Each start of a group has a new number, so nothing counts
twice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import MsgspecError

from mrl import errors
from mrl.errors import MrlError, RolloutError, WorkerLost
from mrl.processes.framing import FrameStream
from mrl.rollout.engine_client import CONNECT_SECONDS, Address
from mrl.rollout.engine_pool import EngineControl, PauseTotals
from mrl.rollout.handshake import prove
from mrl.rollout.request import Sampling
from mrl.rollout.seeds import request_id
from mrl.samples import Group, Prompt, Sample, Status
from mrl.trajectories import worker_messages
from mrl.trajectories.group import GroupInFlight, GroupMaker
from mrl.trajectories.group_messages import GroupFields, samples_of
from mrl.trajectories.trajectory import Trajectory
from mrl.trajectories.worker_messages import GroupStart

CHECK_SECONDS = 1.0
"""Interval between two checks for silent workers."""


class WorkerProcesses(Protocol):
    """Processes of the rollout workers (launch/workers/rollout_workers.py), by number."""

    @property
    def secret(self) -> bytes:
        """Secret by which a worker recognises its driver."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Name of each worker, for messages."""
        ...

    @property
    def engines(self) -> Sequence[Sequence[int]]:
        """Engines of each worker."""
        ...

    async def start_worker(self, number: int) -> Address:
        """Return the address of a worker once it listens; start its process if there is none."""
        ...

    async def begin(self, number: int, groups: Sequence[GroupStart]) -> None:
        """Start groups in a worker."""
        ...

    async def drop(self, number: int, groups: Sequence[int]) -> None:
        """Let a worker forget groups, by their numbers, before it starts later ones."""
        ...

    async def end_worker(self, number: int, why: str) -> None:
        """End the process of a lost worker; return once its engines have paused.

        Raises:
            WorkerLost: The run cannot survive another loss.
        """
        ...


class _Interrupted(Exception):
    """The worker is lost or has no engine: the group restarts elsewhere."""


class RemoteGroup(GroupInFlight):
    """A group in flight in a worker, or waiting for one."""

    def __init__(self, prompt: Prompt, sampling: Sampling, records: tuple[Sample, ...]) -> None:
        super().__init__(prompt, [Trajectory(prompt, number) for number in range(sampling.num_samples)])
        self.sampling, self.records = sampling, records
        self.number = -1
        """Number of the group in messages while a worker has it."""
        self.worker: RemoteWorker | None = None
        self.left: set[int] = set()
        """Workers that had the group and lost all their engines."""
        self.done: asyncio.Future[GroupFields]
        """The group's samples, or _Interrupted."""
        self.waits = False
        self.begin_again()

    def begin_again(self) -> None:
        """Return to the group's records."""
        whole = {record.sample_index for record in self.records if record.status is not Status.INTERRUPTED}
        judged = {record.sample_index for record in self.records if record.verdict is not None}
        numbers = range(self.sampling.num_samples)
        self.lacks([n for n in numbers if n not in whole], [n for n in numbers if n not in judged])

    def lacks(self, unanswered: list[int], unjudged: list[int]) -> None:
        """Set which samples lack a response, and which a verdict."""
        self.unanswered, self.unjudged = unanswered, unjudged
        self.num_incomplete = len(unanswered)

    def start(self, engine: int) -> GroupStart:
        """Return the message that starts the group in its worker."""
        lengths, index = self.sampling.lengths, self.prompt.index
        fixed = None if lengths is None else tuple(lengths(index, n) for n in range(len(self.trajectories)))
        sampling = dataclasses.replace(self.sampling, lengths=None)
        return GroupStart(self.number, self.prompt, sampling, fixed, self.records, engine)

    @property
    def num_unjudged(self) -> int:
        return len(self.unjudged)

    @property
    def waits_for_environments(self) -> bool:
        return self.waits


class RemoteWorker:
    """Driver's view of one rollout worker, whose process may be replaced."""

    def __init__(self, number: int, name: str, heard: Callable[[RemoteWorker, Any], None]) -> None:
        """`heard(worker, message)` is called with each message."""
        self.number, self.name, self._heard = number, name, heard
        self.serving: set[int] = set()
        """Connected engines of the worker."""
        self.groups: dict[int, RemoteGroup] = {}
        """Groups of the worker, by number."""
        self.load = 0
        """Number of samples without a response."""
        self.outbox: list[GroupStart] = []
        self.is_up = asyncio.Event()
        self.is_closed = True
        """False while there is a connection."""
        self.is_released = asyncio.Event()
        """Set unless its process is lost and its engines may still run the process's requests."""
        self.is_released.set()
        self.num_quiet = 0
        """Number of successive checks at which it had sent nothing."""
        self.pulse = worker_messages.WorkerPulse({}, 0, {})
        self.num_started_before = 0
        """Requests that earlier processes of the worker started over."""
        self.pausing: asyncio.Future[worker_messages.RolloutsPaused] | None = None
        self.connecting: dict[int, asyncio.Future[None]] = {}
        self.on_silence: Callable[[str], None] = lambda why: None
        """Called when the worker is silent for too long."""
        self._stream: FrameStream
        self._reading: asyncio.Task[None]

    async def connect(self, address: Address, secret: bytes, on_lost: Callable[[str], None]) -> None:
        """Connect; `on_lost(why)` is called once, when the connection ends. Raise OSError or MsgspecError if
        the worker does not accept."""
        async with asyncio.timeout(CONNECT_SECONDS):
            self._stream = await FrameStream.connect(*address)
            await prove(self._stream, secret)
        self.num_quiet, self.is_closed = 0, False
        self._reading = asyncio.ensure_future(self._read(on_lost))

    async def connect_engine(self, engine: int, address: Address) -> None:
        """Let the worker connect an engine; return once it has tried."""
        self.connecting[engine] = asyncio.get_running_loop().create_future()
        self.send(worker_messages.ConnectEngine(engine, *address))
        await self.connecting[engine]

    def send(self, message: worker_messages.WorkerMessage) -> None:
        self._stream.write(worker_messages.encode_worker_message(message))

    def close(self) -> None:
        """Close the connection; pending calls raise _Interrupted."""
        self.is_closed = True
        self.is_up.clear()
        self._stream.close()
        self._reading.cancel()
        for future in [*self.connecting.values(), *([self.pausing] if self.pausing else [])]:
            if not future.done():
                future.set_exception(_Interrupted())
        self.connecting, self.pausing = {}, None
        self.num_started_before += self.pulse.num_started_over
        self.pulse = worker_messages.WorkerPulse({}, 0, {})
        self.serving.clear()
        self.outbox.clear()

    async def _read(self, on_lost: Callable[[str], None]) -> None:
        why = f"{self.name} closed its connection"
        try:
            while (data := await self._stream.read()) is not None:
                self.num_quiet = 0
                self._heard(self, worker_messages.decode_worker_message(data))
        except Exception as error:  # any error: its groups would get no more messages
            why = f"{self.name}: its connection failed: {error!r}"
        on_lost(why)


class WorkerEngines(EngineControl):
    """Engines of a run, each reached through its node's worker; paused until `resume`."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        engines: Sequence[Sequence[int]],
        *,
        on_lost: Callable[[int, str, str], None],
        on_change: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        """`on_lost(engine, why, kind)`: called when an engine's connection ends. `on_change`: called when an
        engine comes or goes. `flush`: sends the groups that are to start."""
        self._workers, self._on_lost, self._on_change, self._flush = workers, on_lost, on_change, flush
        self._worker_of = {
            engine: worker for worker, numbers in zip(workers, engines, strict=True) for engine in numbers
        }
        self._addresses: dict[int, Address] = {}
        """Addresses of the live engines, as far as known."""
        self.newest_version = -1
        self.runs = self.trains = False
        self.num_begun_again = 0
        """Number of samples that were restarted in another worker."""
        self.num_waiting = 0
        """Number of groups that wait for a worker with an engine."""

    @property
    def serving(self) -> dict[int, RemoteWorker]:
        """Connected engines: number -> worker."""
        return {engine: worker for worker in self._workers for engine in sorted(worker.serving)}

    async def connect(self, number: int, address: Address) -> None:
        """Connect a paused engine, which serves from the next `resume` on."""
        self._addresses[number], worker = address, self._worker_of[number]
        if not worker.is_up.is_set():
            await worker.is_up.wait()  # connect_known() connects it
        elif number not in worker.serving:
            with contextlib.suppress(_Interrupted):  # the replacement process connects it
                await worker.connect_engine(number, address)

    async def connect_known(self, worker: RemoteWorker) -> None:
        """Connect all engines of a new worker, and let it run as the others do.

        Raises:
            _Interrupted: The worker is lost again.
        """
        engines = [engine for engine, owner in self._worker_of.items() if owner is worker]
        while missing := [e for e in engines if e in self._addresses and e not in worker.serving]:
            if worker.is_closed:
                raise _Interrupted
            await worker.connect_engine(missing[0], self._addresses[missing[0]])
        if worker.is_closed:
            raise _Interrupted
        worker.is_up.set()
        if self.runs:
            worker.send(worker_messages.ResumeRollouts(self.trains))
        self._on_change()

    def heard(self, worker: RemoteWorker, message: Any) -> None:
        """Handle a worker's message about engines."""
        match message:
            case worker_messages.EngineConnected():
                if message.engine in self._addresses:
                    worker.serving.add(message.engine)
                if (future := worker.connecting.pop(message.engine, None)) is not None and not future.done():
                    future.set_result(None)
                if worker.is_up.is_set():
                    self._on_change()
            case worker_messages.EngineGone():
                worker.serving.discard(message.engine)
                self._addresses.pop(message.engine, None)
                self._on_lost(message.engine, message.why, message.kind)
                self._on_change()
            case worker_messages.RolloutsPaused():
                if worker.pausing is not None and not worker.pausing.done():
                    worker.pausing.set_result(message)
            case _:
                raise RolloutError(f"{worker.name} sent an unexpected {type(message).__name__}")

    async def pause(self, *, snapshot: bool) -> PauseTotals:
        self._flush()
        self.runs = False
        done = await asyncio.gather(*(self._pause(worker, snapshot) for worker in self._workers))
        return PauseTotals(sum(reply.num_requests for reply in done), sum(reply.num_tokens for reply in done))

    async def _pause(
        self, worker: RemoteWorker, snapshot: bool
    ) -> worker_messages.RolloutsPaused | PauseTotals:
        if worker.is_up.is_set():
            worker.pausing = asyncio.get_running_loop().create_future()
            worker.send(worker_messages.PauseRollouts(snapshot))
            with contextlib.suppress(_Interrupted):
                done = await worker.pausing
                for number, data in done.groups:
                    if (group := worker.groups.get(number)) is not None:
                        group.records = samples_of(data, group.prompt)
                return done
        await worker.is_released.wait()
        return PauseTotals()

    def resume(self, *, training: bool = True) -> None:
        self.runs, self.trains = True, training
        for worker in self._workers:
            if worker.is_up.is_set():
                worker.send(worker_messages.ResumeRollouts(training))

    @property
    def is_stranded(self) -> bool:
        waits = self.num_waiting or any(worker.groups for worker in self._workers)
        return bool(waits) and not self._addresses

    def late(self, seconds: float) -> list[int]:
        """Return the engines that have work and made no step for `seconds`. Callable from any thread."""
        pulses = [worker.pulse for worker in self._workers]
        return [e for pulse in pulses for e, silent in pulse.silent_seconds.items() if silent > seconds]

    @property
    def num_started_over(self) -> int:
        """Number of requests that were generated again elsewhere."""
        numbers = (worker.num_started_before + worker.pulse.num_started_over for worker in self._workers)
        return self.num_begun_again + sum(numbers)

    def give_up(self, number: int, why: str) -> None:
        """Generate an engine's requests elsewhere."""
        self._addresses.pop(number, None)
        if (worker := self._worker_of[number]).is_up.is_set():
            worker.send(worker_messages.GiveUpEngine(number, why))


class RemoteRollouts(GroupMaker):
    """Maker of groups in rollout workers."""

    engines: WorkerEngines
    worker_class: type[RemoteWorker] = RemoteWorker

    def __init__(
        self,
        processes: WorkerProcesses,
        *,
        by_index: bool,
        silent_seconds: float,
        on_failure: Callable[[BaseException], None],
        on_engine_lost: Callable[[int, str, str], None],
    ) -> None:
        """Start the workers.

        Args:
            by_index: True if a prompt's index alone decides its engine, as without workers; otherwise a group
                goes to the worker with the fewest samples per engine.
            silent_seconds: A worker that sends nothing for so long is lost.
            on_failure: Called with the error that ends the run.
            on_engine_lost: Called with (engine, why, class name of the error) when a connection ends.
        """
        super().__init__()
        self._processes, self._by_index, self._on_failure = processes, by_index, on_failure
        self._silent_seconds = silent_seconds
        self._workers = [self.worker_class(n, name, self._heard) for n, name in enumerate(processes.names)]
        self.engines = WorkerEngines(
            self._workers,
            processes.engines,
            on_lost=on_engine_lost,
            on_change=self._engines_changed,
            flush=self._flush,
        )
        self._serves = asyncio.Event()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        for worker in self._workers:
            self._task(self._open(worker))
        self._task(self._look())

    # -- groups ----------------------------------------------------------------------------------------------

    def start(self, prompt: Prompt, sampling: Sampling, records: Iterable[Sample] = ()) -> GroupInFlight:
        group = RemoteGroup(prompt, sampling, tuple(records))
        group.task = asyncio.get_running_loop().create_task(self._run(group))
        return group

    async def _run(self, group: RemoteGroup) -> Group:
        """Have a worker make a group, one after another if some are lost."""
        while True:
            worker, engine = await self._choose(group)
            self._assign(group, worker, engine)
            data = None
            try:
                data = await group.done
            except _Interrupted:
                pass
            except asyncio.CancelledError:
                if worker.is_up.is_set():
                    self._call(self._processes.drop(worker.number, [group.number]))
                raise
            finally:
                self._leave(group, worker)
            if data is not None:
                break
            self.engines.num_begun_again += group.num_incomplete
            group.begin_again()
        self._progressed(group, worker, [], [], waits=False)
        return Group(group.prompt, samples_of(data, group.prompt))

    async def _choose(self, group: RemoteGroup) -> tuple[RemoteWorker, int]:
        """Wait until an engine serves; return a group's worker, and its engine if the prompt's index decides
        it, else -1."""
        while not (serving := self.engines.serving):
            self._serves.clear()
            self.engines.num_waiting += 1
            try:
                await self._serves.wait()
            finally:
                self.engines.num_waiting -= 1
        if self._by_index:
            engine = sorted(serving)[group.prompt.index % len(serving)]
            return serving[engine], engine
        able = [worker for worker in self._workers if worker.serving]
        others = [worker for worker in able if worker.number not in group.left]
        return min(others or able, key=lambda w: (w.load / len(w.serving), w.number)), -1

    def _assign(self, group: RemoteGroup, worker: RemoteWorker, engine: int) -> None:
        loop = asyncio.get_running_loop()
        group.number, group.worker, group.done = next(self._numbers), worker, loop.create_future()
        worker.groups[group.number] = group
        worker.load += group.num_incomplete
        if not any(peer.outbox for peer in self._workers):
            loop.call_soon(self._flush)
        worker.outbox.append(group.start(engine))

    def _leave(self, group: RemoteGroup, worker: RemoteWorker) -> None:
        if worker.groups.pop(group.number, None) is not None:
            worker.load -= group.num_incomplete
        group.worker = None

    def _flush(self) -> None:
        """Send the groups of this loop iteration, ordered by prompt: one call per worker."""
        for worker in self._workers:
            starts, worker.outbox = worker.outbox, []
            starts = [start for start in starts if start.number in worker.groups]
            if starts:
                self._call(self._processes.begin(worker.number, starts))

    def _call(self, call: Awaitable[None]) -> None:
        """Call a worker's process; calls start in order."""

        async def done() -> None:
            try:
                await call
            except WorkerLost:
                return  # its connection ends too
            except Exception as error:
                self._on_failure(error)

        self._task(done())

    # -- what workers send -----------------------------------------------------------------------------------

    def _heard(self, worker: RemoteWorker, message: Any) -> None:
        match message:
            case worker_messages.GroupsDone():
                self._note_version(message.newest_version)
                for number, data in message.groups:
                    if (group := worker.groups.get(number)) is not None and not group.done.done():
                        group.done.set_result(data)
                self.note()
            case worker_messages.GroupsProgress():
                self._note_version(message.newest_version)
                for progress in message.groups:
                    if (group := worker.groups.get(progress.number)) is not None:
                        waits = progress.waits_for_environments
                        self._progressed(group, worker, progress.unanswered, progress.unjudged, waits=waits)
                self.note()
            case worker_messages.WorkerPulse():
                worker.pulse = message
            case worker_messages.WorkerFailure():
                cause = getattr(errors, message.kind, None)
                kind = cause if cause is not None and issubclass(cause, MrlError) else RolloutError
                self._on_failure(kind(f"{worker.name}: {message.text}"))
            case _:
                self.engines.heard(worker, message)

    def _note_version(self, version: int) -> None:
        self.engines.newest_version = max(self.engines.newest_version, version)

    def _progressed(
        self,
        group: RemoteGroup,
        worker: RemoteWorker,
        unanswered: list[int],
        unjudged: list[int],
        *,
        waits: bool,
    ) -> None:
        if group.number in worker.groups:
            worker.load += len(unanswered) - group.num_incomplete
        group.lacks(unanswered, unjudged)
        group.waits = waits
        if not unanswered:
            group.completed.set()

    # -- workers that come and go ----------------------------------------------------------------------------

    async def _open(self, worker: RemoteWorker) -> None:
        try:
            address = await self._processes.start_worker(worker.number)
            lost = False

            def on_lost(why: str) -> None:
                nonlocal lost
                if not lost:
                    lost = True
                    self._lost(worker, why)

            worker.on_silence = on_lost
            await worker.connect(address, self._processes.secret, on_lost)
            with contextlib.suppress(_Interrupted):
                await self.engines.connect_known(worker)
        except (OSError, MsgspecError) as error:
            self._on_failure(WorkerLost(f"{worker.name} could not be reached: {error!r}"))
        except Exception as error:
            self._on_failure(error)

    def _lost(self, worker: RemoteWorker, why: str) -> None:
        """Restart a worker's groups elsewhere, and replace its process."""
        worker.is_released.clear()
        worker.close()
        self._interrupt(worker)
        self._task(self._replace(worker, why))

    async def _replace(self, worker: RemoteWorker, why: str) -> None:
        try:
            await self._processes.end_worker(worker.number, why)
        except Exception as error:
            self._on_failure(error)
            return
        worker.is_released.set()
        await self._open(worker)

    def _interrupt(self, worker: RemoteWorker) -> None:
        for group in list(worker.groups.values()):
            if not group.done.done():
                group.done.set_exception(_Interrupted())

    def _engines_changed(self) -> None:
        """Start groups that waited for an engine, and move the groups of workers that have none left."""
        if not (serving := self.engines.serving):
            return
        self._serves.set()
        able = set(serving.values())
        for worker in self._workers:
            if worker.groups and worker.is_up.is_set() and worker not in able:
                self._call(self._processes.drop(worker.number, list(worker.groups)))
                for group in worker.groups.values():
                    group.left.add(worker.number)
                self._interrupt(worker)

    async def _look(self) -> None:
        """Give up silent workers. Checks are counted, not time: this process may have been suspended."""
        limit = max(2, round(self._silent_seconds / CHECK_SECONDS))
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for worker in self._workers:
                worker.num_quiet += worker.is_up.is_set()
                if worker.num_quiet > limit:
                    worker.num_quiet = 0
                    worker.on_silence(
                        f"{worker.name} sent nothing within rollout.step_deadline_seconds = "
                        f"{self._silent_seconds:g} s"
                    )

    def _task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Do nothing: whoever started the workers' processes ends them."""

    # -- reports ---------------------------------------------------------------------------------------------

    def saved(self, group: GroupInFlight) -> Group:
        assert isinstance(group, RemoteGroup), "groups of this object are remote"
        return Group(group.prompt, group.records)

    def missing(self, groups: Iterable[GroupInFlight]) -> tuple[list[str], list[str]]:
        unanswered: list[str] = []
        unjudged: list[str] = []
        for group in groups:
            assert isinstance(group, RemoteGroup), "groups of this object are remote"
            where = self._where(group)
            names = [request_id(group.prompt.index, number) for number in range(len(group.trajectories))]
            unanswered += [f"{names[number]} {where}" for number in group.unanswered]
            unjudged += [names[number] for number in group.unjudged]
        return unanswered, unjudged

    def _where(self, group: RemoteGroup) -> str:
        if group.worker is None:
            return "in no rollout worker"
        status = group.worker.pulse.lacks.get(group.number, "")
        return f"in {group.worker.name}" + (f", which reports: {status}" if status else "")
