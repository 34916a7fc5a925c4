"""What a stage's queue holds and a worker does: tasks, batches, and why one failed."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence

from mrl.processes.worker_process import Used, WorkerProcess
from mrl.rewards.contract import RewardRequest
from mrl.samples import Verdict

Done = Callable[[Sequence[Verdict | None]], None]


class Cause(enum.Enum):
    """What a failed attempt says of the sample."""

    FAILED = "the verifier says so itself, or breaks its contract: nothing"
    RAISED = "the verifier's own code raised: it may be the sample, where it raises alike again and again"
    DIED = "its process died or hung: it may be the sample"
    COMPUTED = "its process computed on it for the whole deadline: another attempt would be the same"
    REFUSED = "what the verifier asks will not answer, however often it is asked: nothing"
    STARVED = "the machine gave its process no processor: nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed."""

    cause: Cause
    reason: str
    where: str = ""
    """Type and place of what was raised."""


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Work that one verifier call does: one sample, or all samples of a group."""

    requests: tuple[RewardRequest, ...]
    done: Done
    """Called once, with one verdict per request."""
    faults: list[AttemptFailure] = dataclasses.field(default_factory=list)
    """One for each failed attempt by itself."""
    alone: bool = False
    """Failed in a batch: goes by itself from now on."""
    successes_at_failure: int = -1
    """The queue's successes when this task failed first; -1 before."""
    is_control: bool = False
    """Runs to find out whether the verifier is healthy."""

    @property
    def is_starved(self) -> bool:
        """Goes when nothing else of its stage runs."""
        return bool(self.faults) and self.faults[-1].cause is Cause.STARVED

    @property
    def group_id(self) -> int:
        return self.requests[0].group_id


@dataclasses.dataclass(slots=True, eq=False)
class TaskBatch:
    """What one message asks of a reward worker."""

    number: int
    """The reply carries it."""
    tasks: tuple[Task, ...]
    since: float
    """When it was sent (monotonic seconds)."""

    @property
    def requests(self) -> list[RewardRequest]:
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
    running: dict[int, TaskBatch] = dataclasses.field(default_factory=dict)
    """By the number that the reply will carry."""
    idle_since: float = 0.0
    """When it was last heard of (monotonic seconds)."""
    num_sent: int = 0
    """Batches it was given so far."""
    watched_from: float = 0.0
    """When its process' figures were taken for what it is doing (monotonic seconds); 0 as long as that is short."""
    used: Used = dataclasses.field(default_factory=Used)
    """Since then, as far as it was asked for."""

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
