"""Tasks, batches, failures and workers of a stage's queue."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence

from mrl.processes.worker_process import TimeUsed, WorkerProcess
from mrl.rewards.contract import RewardRequest
from mrl.samples import Verdict

Done = Callable[[Sequence[Verdict | None]], None]


class Cause(enum.Enum):
    """Cause of a failed attempt, and what it implies about the sample."""

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
    """Type and place of the raised error."""


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Work of one verifier call: one sample, or all samples of a group."""

    requests: tuple[RewardRequest, ...]
    done: Done
    """Called once, with one verdict per request."""
    faults: list[AttemptFailure] = dataclasses.field(default_factory=list)
    """One per failed attempt outside a batch."""
    alone: bool = False
    """True after a failure in a batch: it is never batched again."""
    successes_at_failure: int = -1
    """The queue's successes at this task's first failure; -1 before it."""
    is_control: bool = False
    """True if it only checks whether the verifier is healthy."""

    @property
    def is_starved(self) -> bool:
        """True if it must run while nothing else of its stage runs."""
        return bool(self.faults) and self.faults[-1].cause is Cause.STARVED

    @property
    def group_id(self) -> int:
        return self.requests[0].group_id


@dataclasses.dataclass(slots=True, eq=False)
class TaskBatch:
    """Tasks of one message to a reward worker."""

    number: int
    """Number that the reply repeats."""
    tasks: tuple[Task, ...]
    since: float
    """Time of sending (monotonic seconds)."""

    @property
    def requests(self) -> list[RewardRequest]:
        return [request for task in self.tasks for request in task.requests]


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """Reward worker and its running batches."""

    process: WorkerProcess
    started: float
    ready: bool = False
    name: str = ""
    version: str = ""
    capacity: int = 1
    """Largest number of running batches: one, or many if the verifier mostly waits."""
    running: dict[int, TaskBatch] = dataclasses.field(default_factory=dict)
    """By batch number."""
    idle_since: float = 0.0
    """Time of its last reply (monotonic seconds)."""
    num_sent: int = 0
    """Batches sent so far."""
    watched_from: float = 0.0
    """Start of measuring the process's CPU use for the running work (monotonic seconds); 0 before."""
    used: TimeUsed = dataclasses.field(default_factory=TimeUsed)
    """CPU use since `watched_from`, as of the last measurement."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All running tasks."""
        return tuple(task for batch in self.running.values() for task in batch.tasks)


class FairQueue:
    """Queue that is first in, first out inside a group; groups take turns."""

    def __init__(self) -> None:
        self._groups: collections.OrderedDict[int, collections.deque[Task]] = collections.OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, task: Task) -> None:
        self._groups.setdefault(task.group_id, collections.deque()).append(task)
        self._length += 1

    def first(self) -> Task:
        """Return the task that `pop` returns next."""
        return next(iter(self._groups.values()))[0]

    def pop(self) -> Task:
        group_id, tasks = self._groups.popitem(last=False)
        task = tasks.popleft()
        if tasks:
            self._groups[group_id] = tasks  # to the end of the round
        self._length -= 1
        return task
