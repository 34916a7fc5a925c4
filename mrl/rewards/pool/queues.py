"""Waiting tasks and workers by stage, and the policy for tasks whose worker fails.

Tasks that failed together (a batch, or all tasks of a worker) are retried one by one. After its last attempt
a task's sample counts as incorrect if it killed the worker or raised the same error in every attempt while
the verifier is healthy (it scores other samples, or an earlier one again); otherwise it has no reward.
"""

from __future__ import annotations

import collections
import itertools
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from mrl.errors import RewardError
from mrl.processes.worker_process import TimeUsed
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, no_reward, scored
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.work import AttemptFailure, Cause, FairQueue, Task, TaskBatch, Worker
from mrl.rewards.pool.worker_deadlines import WorkerDeadlines
from mrl.rewards.verdict_json import decode_verdict
from mrl.samples import Verdict

_log = logging.getLogger(__name__)

HINT = "; catch it in the function and return a number, or None for no reward"
IDLE_SECONDS = 900.0
"""A worker idle for so long ends; the next sample starts another one."""


class StageQueue:
    """Tasks and workers of one stage of one kind, and the verifier's health."""

    def __init__(
        self, kind: RewardKind, stage: Stage, section: RewardSection, counts: collections.Counter[str]
    ) -> None:
        self.kind, self.stage, self.part = kind, stage, kind.part
        self.workers: list[Worker] = []
        self.following: StageQueue | None = None
        """Next stage, for samples that get None from this one."""
        self.deadlines = WorkerDeadlines(kind.part.deadline_seconds, stage)
        self._section, self._counts = section, counts
        self._is_cheap = stage.batch_size > 1
        is_one = self._is_cheap or stage.one_process
        self._num_workers = 1 if is_one else section.workers
        self._tasks = FairQueue()
        self._delayed: list[tuple[float, Task]] = []
        self._numbers = itertools.count()
        self._jitter = random.Random(0)
        self._successes = 0
        self._last_scored: tuple[RewardRequest, ...] | None = None
        self._undecided: list[tuple[Task, list[Verdict], list[Verdict]]] = []
        """(task, verdicts if the verifier is broken, else): failures before any sample was scored."""
        self._start_failures = 0
        self._start_again_at = 0.0
        self._start_fault = ""
        self._version = ""
        """Version of the first worker; others are refused, so that a run has only one verifier."""

    @property
    def label(self) -> str:
        """Name of the verifier, with the stage if it has several."""
        return f"{self.part.label}.{self.stage.name}" if self.stage.name != "whole" else self.part.label

    def put(self, task: Task) -> None:
        """Add a task at the end of its group."""
        self._tasks.push(task)

    def release_delayed(self, now: float) -> None:
        """Queue the tasks whose retry delay is over."""
        due = [task for at, task in self._delayed if at <= now]
        self._delayed = [(at, task) for at, task in self._delayed if at > now]
        for task in due:
            self.put(task)
        if self._undecided and not (self._tasks or self._delayed or any(w.running for w in self.workers)):
            for task, failed, _ in self._undecided:
                task.done(failed)
            self._undecided.clear()

    def next_batch(self, worker: Worker, now: float) -> TaskBatch | None:
        """Return the worker's next batch (several tasks if they are cheap), or None."""
        if not self._has_work_for(worker):
            return None
        tasks = [self._tasks.pop()]
        while self._tasks and len(tasks) < self.stage.batch_size and not tasks[-1].alone:
            tasks.append(self._tasks.pop())
        if len(tasks) > 1 and tasks[-1].alone:
            self.put(tasks.pop())
        batch = TaskBatch(next(self._numbers), tuple(tasks), now)
        worker.running[batch.number] = batch
        worker.num_sent += 1
        worker.used = TimeUsed()
        if len(worker.running) == 1:
            worker.watched_from = 0.0
        return batch

    def _has_work_for(self, worker: Worker) -> bool:
        """Return True if the worker may take a task. A starved task runs alone in its stage."""
        if not worker.ready or not self._tasks or worker.num_sent >= self._section.tasks_per_worker:
            return False
        if self._tasks.first().is_starved:
            return not any(other.running for other in self.workers)
        if any(task.is_starved for other in self.workers for task in other.tasks):
            return False
        if not worker.running:
            return True
        alone = self._tasks.first().alone or any(task.alone for task in worker.tasks)
        return len(worker.running) < worker.capacity and not alone

    def num_to_start(self, now: float) -> int:
        """Return the number of missing workers: 0 after a failed start, until its delay is over."""
        starting = sum(not worker.ready for worker in self.workers)
        missing = min(len(self._tasks) - starting, self._num_workers - len(self.workers))
        if missing > 0 and now < self._start_again_at:
            self._give_up_if_broken()
            return 0
        return max(missing, 0)

    def next_event(self) -> list[float]:
        """Return the times at which retry delays end and deadlines pass (monotonic seconds)."""
        looks = [self.deadlines.next_look(worker) for worker in self.workers]
        return [*(at for at, _ in self._delayed), *(at for at in looks if at)]

    def is_spent(self, worker: Worker) -> bool:
        """Return True if the worker has done its `tasks_per_worker` batches."""
        return worker.num_sent >= self._section.tasks_per_worker and not worker.running

    def is_idle(self, worker: Worker, now: float) -> bool:
        """Return True if the worker has been idle for more than IDLE_SECONDS."""
        idle = worker.ready and not worker.running
        return idle and now - worker.idle_since > IDLE_SECONDS

    def opened(self, worker: Worker, reply: dict[str, Any]) -> str:
        """Process a worker's first reply; return why it cannot be used, or "" if it is ready."""
        if "broken" in reply:
            return str(reply["broken"])
        version = str(reply.get("version", ""))
        self._version = self._version or version
        if version != self._version:
            return (
                f"its source changed during the run (version {self._version}, now {version}); restart the run"
            )
        worker.ready = True
        worker.idle_since = time.monotonic()
        worker.name, worker.version = str(reply.get("ready", "")), version
        worker.capacity = self.part.concurrency if reply.get("waits") else 1
        self._start_failures, self._start_fault = 0, ""
        return ""

    def replied(self, worker: Worker, reply: dict[str, Any]) -> None:
        """Pass a worker's reply to its tasks; raise RewardError if it belongs to no open batch."""
        number = reply.get("number")
        if not isinstance(number, int) or number not in worker.running:
            raise RewardError(f"a reward worker's reply belongs to no open request: {str(reply)[:200]}")
        tasks = worker.running.pop(number).tasks
        worker.idle_since = time.monotonic()
        if "verdicts" in reply:
            self._take_verdicts(worker, tasks, reply["verdicts"])
        elif "limit" in reply:
            self._counts["limit"] += 1
            for task in tasks:
                task.done([scored(self.part.min_reward, str(reply["limit"]))] * len(task.requests))
        else:
            self._failed(tasks, _fault_of(reply))

    def _take_verdicts(self, worker: Worker, tasks: Sequence[Task], replies: Any) -> None:
        expected = sum(len(task.requests) for task in tasks)
        if not isinstance(replies, list) or len(replies) != expected:
            self._failed(
                tasks, AttemptFailure(Cause.FAILED, f"{len(replies)} verdicts for {expected} samples")
            )
            return
        remaining = iter(replies)
        for task in tasks:
            try:
                verdicts = [self._decoded(worker, r, next(remaining)) for r in task.requests]
            except RewardError as error:
                self._failed((task,), AttemptFailure(Cause.FAILED, str(error)))
                continue
            self._scored(task, verdicts)

    def _decoded(self, worker: Worker, request: RewardRequest, reply: Any) -> Verdict | None:
        tokens = request.response_tokens
        return decode_verdict(
            reply,
            verifier=worker.name,
            version=worker.version,
            num_tokens=None if tokens is None else len(tokens),
        )

    def _scored(self, task: Task, verdicts: Sequence[Verdict | None]) -> None:
        self._successes += not task.is_control
        self._last_scored = task.requests
        while self._undecided:
            self._check_verifier(task.requests, *self._undecided.pop())
        if self.following is not None and verdicts == [None]:
            self.following.put(Task(task.requests, task.done))
        else:
            task.done(verdicts)

    def lost(self, worker: Worker, fault: AttemptFailure) -> None:
        """Retry the tasks of a worker that ended or was killed."""
        if not worker.ready:
            self.start_failed(fault.reason)
            return
        self._counts["processes_lost"] += 1
        self._failed(worker.tasks, fault)

    def start_failed(self, reason: str) -> None:
        """Record a failed start and double the delay before the next one."""
        self._start_failures += 1
        self._start_fault = reason
        self._start_again_at = time.monotonic() + min(0.2 * 2**self._start_failures, 30.0)
        self._counts["starts_failed"] += 1
        _log.warning("verifier %s: cannot start: %s", self.label, reason)
        self._give_up_if_broken()

    def _give_up_if_broken(self) -> None:
        if self._start_failures <= self._section.retries:
            return
        verdict = no_reward(f"verifier {self.label} cannot start: {self._start_fault}")
        while self._tasks:
            task = self._tasks.pop()
            task.done([verdict] * len(task.requests))

    def _failed(self, tasks: Sequence[Task], fault: AttemptFailure) -> None:
        for task in tasks:
            if task.successes_at_failure < 0:
                task.successes_at_failure = self._successes
            if len(tasks) > 1:
                task.alone = True  # the culprit in the batch is unknown: the attempt does not count
                self.put(task)
                continue
            task.faults.append(fault)
            self._counts["failures"] += 1
            if len(task.faults) <= self._retries(fault) and not task.is_control:
                is_delayed = fault.cause in (Cause.FAILED, Cause.RAISED)
                delay = 0.1 * 2 ** len(task.faults) * self._jitter.uniform(0.5, 1.5) if is_delayed else 0.0
                self._delayed.append((time.monotonic() + delay, task))
                continue
            self._exhausted(task, fault)

    def _retries(self, fault: AttemptFailure) -> int:
        """Return the number of retries after such a fault: none if it would fail again, one if starved."""
        limits = {Cause.COMPUTED: 0, Cause.REFUSED: 0, Cause.STARVED: 1}
        return min(self._section.retries, limits.get(fault.cause, self._section.retries))

    def _exhausted(self, task: Task, fault: AttemptFailure) -> None:
        size, label = len(task.requests), self.label
        is_users = fault.cause is Cause.RAISED and self.part.kind == "plugin"
        reason = f"{fault.reason}{HINT if is_users else ''}"
        times = f"{len(task.faults)} times, last" if len(task.faults) > 1 else "once"
        failed = [no_reward(f"verifier {label} failed {times}: {reason}")] * size
        verb = "raises on" if fault.cause is Cause.RAISED else "dies of"
        wrong = [scored(self.part.min_reward, f"verifier {label} {verb} this sample: {reason}")] * size
        if task.is_control or not _may_be_the_sample(task):
            task.done(failed)
        elif fault.cause is Cause.DIED and self._successes > task.successes_at_failure:
            self._counts["poisonous"] += 1
            task.done(wrong)
        elif self._last_scored is not None:
            self._check_verifier(self._last_scored, task, failed, wrong)
        else:
            self._undecided.append((task, failed, wrong))

    def _check_verifier(
        self, requests: tuple[RewardRequest, ...], task: Task, failed: list[Verdict], wrong: list[Verdict]
    ) -> None:
        """Verify an earlier scored sample again, to distinguish a broken verifier from a bad sample."""

        def decide(verdicts: Sequence[Verdict | None]) -> None:
            is_broken = any(verdict is not None and verdict.value is None for verdict in verdicts)
            self._counts["poisonous"] += not is_broken
            task.done(failed if is_broken else wrong)

        self.put(Task(requests, decide, alone=True, is_control=True))


def queues_of(kind: RewardKind, section: RewardSection, counts: collections.Counter[str]) -> StageQueue:
    """Return the queue of a kind's first stage; each queue links to the next stage's."""
    queues = [StageQueue(kind, stage, section, counts) for stage in kind.used_stages()]
    for queue, following in itertools.pairwise(queues):
        queue.following = following
    return queues[0]


def _fault_of(reply: dict[str, Any]) -> AttemptFailure:
    """Return the failure that a worker reports."""
    reason = str(reply.get("failed", reply))[:500]
    if reply.get("starved"):
        return AttemptFailure(Cause.STARVED, reason)
    if reply.get("refused"):
        return AttemptFailure(Cause.REFUSED, reason)
    where = str(reply.get("raised", ""))[:500]
    return AttemptFailure(Cause.RAISED if where else Cause.FAILED, reason, where)


def _may_be_the_sample(task: Task) -> bool:
    """Return True if the sample, not a healthy verifier, may be the cause: the process died in the last
    attempt, or a task of one sample raised at the same place in every attempt, more than once."""
    cause = task.faults[-1].cause
    if cause is not Cause.RAISED:
        return cause in (Cause.DIED, Cause.COMPUTED)
    places = {fault.where for fault in task.faults}
    return len(places) == 1 and len(task.faults) > 1 and len(task.requests) == 1
