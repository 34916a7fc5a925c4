"""Queues by kind of work. One lane holds the tasks and the processes of one verifier's one stage.

Samples of different prompts take turns inside a lane, so a prompt with slow samples delays the others by at most one
task per turn. Owns order and bookkeeping; processes are driven by `dispatch`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from mrl.config.sections.reward import RewardPart
from mrl.rewards.contract import Request
from mrl.rewards.pool.process import WorkerProcess
from mrl.rewards.registry import keeps_deadline
from mrl.samples import Verdict

_BATCHED = {"instructions": 32, "format": 32, "repetition": 32}

Done = Callable[[Sequence[Verdict | None]], None]


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Work that one verifier call does: one sample, or all samples of a group."""

    requests: tuple[Request, ...]
    done: Done
    """Called once, with one verdict per request."""
    attempts: int = 0
    alone: bool = False
    """Failed in a batch: goes by itself from now on."""
    successes_at_failure: int = -1
    """The lane's successes when this task failed first; -1 before."""
    is_control: bool = False
    """Runs to find out whether the verifier is healthy."""

    @property
    def group_id(self) -> int:
        return self.requests[0].group_id


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """What one message asks of a reward worker."""

    tasks: tuple[Task, ...]
    since: float
    """When it was sent (monotonic seconds)."""

    @property
    def requests(self) -> list[Request]:
        return [request for task in self.tasks for request in task.requests]


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """A reward worker and what it is doing."""

    process: WorkerProcess
    started: float
    ready: bool = False
    name: str = ""
    version: str = ""
    capacity: int = 1
    """Batches it has at once: one, or many where the verifier spends its time waiting."""
    running: dict[int, Batch] = dataclasses.field(default_factory=dict)
    """By the number that the reply will carry."""
    idle_since: float = 0.0
    """When it was last heard of (monotonic seconds)."""
    num_sent: int = 0
    """Tasks it was given so far."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All it is working on."""
        return tuple(task for batch in self.running.values() for task in batch.tasks)


class FairQueue:
    """First in, first out inside a group; groups take turns."""

    def __init__(self) -> None:
        self._groups: collections.OrderedDict[int, collections.deque[Task]] = collections.OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, task: Task) -> None:
        self._groups.setdefault(task.group_id, collections.deque()).append(task)
        self._length += 1

    def first(self) -> Task:
        """The task that `pop` gives next."""
        return next(iter(self._groups.values()))[0]

    def pop(self) -> Task:
        group_id, tasks = self._groups.popitem(last=False)
        task = tasks.popleft()
        if tasks:
            self._groups[group_id] = tasks  # to the end of the round
        self._length -= 1
        return task


class Lane:
    """Tasks and processes of one stage of one verifier."""

    def __init__(self, part: RewardPart, stage: str, *, num_workers: int) -> None:
        self.part = part
        self.stage = stage
        self.cheap = stage == "exact" or part.kind in _BATCHED
        self.keeps_deadline = keeps_deadline(part, stage)
        self.num_workers = 1 if self.cheap else (part.workers or num_workers)
        self.batch_size = 64 if stage == "exact" else _BATCHED.get(part.kind or "", 1)
        self.queue = FairQueue()
        self.delayed: list[tuple[float, Task]] = []
        self.workers: list[Worker] = []
        self.next_lane: Lane | None = None
        """Takes what this stage answers None to."""
        self.successes = 0
        self.last_good: tuple[Request, ...] | None = None
        self.start_failures = 0
        self.start_again_at = 0.0
        self.broken_reason = ""
        self.version = ""
        """Of the first process; another one is refused, so that one run has one verifier."""

    @property
    def label(self) -> str:
        return f"{self.part.label}.{self.stage}" if self.stage != "whole" else self.part.label

    def has_work_for(self, worker: Worker, *, tasks_per_worker: int) -> bool:
        """Whether the worker takes the next batch now. A task that goes alone waits until nothing else runs beside it,
        and nothing is started beside it.
        """
        if not worker.ready or not self.queue or worker.num_sent >= tasks_per_worker:
            return False
        if not worker.running:
            return True
        alone = self.queue.first().alone or any(task.alone for task in worker.tasks)
        return len(worker.running) < worker.capacity and not alone

    def next_batch(self) -> tuple[Task, ...]:
        """Tasks for one message: several cheap ones, or one."""
        batch = [self.queue.pop()]
        while self.queue and len(batch) < self.batch_size and not batch[-1].alone:
            batch.append(self.queue.pop())
        if len(batch) > 1 and batch[-1].alone:
            self.queue.push(batch.pop())
        return tuple(batch)

    def release_delayed(self, now: float) -> None:
        """Put tasks whose pause is over back into the queue."""
        due = [task for at, task in self.delayed if at <= now]
        self.delayed = [(at, task) for at, task in self.delayed if at > now]
        for task in due:
            self.queue.push(task)
