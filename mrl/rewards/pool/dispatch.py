"""The thread that drives reward workers.

consumes      tasks put into lanes
produces      calls of each task's `done`, exactly once
waits for     replies, the ends of processes, deadlines; all in one place, with a time-out always
unblocked by  a byte on the wake-up pipe

Policy: a deadline counts from the start of the work. A reward worker that dies, hangs or breaks its contract is
killed by pid and replaced, and its task tried again; what failed together (a batch, or all that a process was waiting for)
is tried one by one. When a task has used
up its attempts the verifier's health decides: where the process died on this sample while others were scored (or a
sample scored before is scored again), the sample is wrong; otherwise it has no reward.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import random
import selectors
import threading
import time
from collections.abc import Sequence
from typing import Any

from mrl.config.sections.reward import RewardPart
from mrl.errors import RewardError
from mrl.rewards.contract import no_reward, scored
from mrl.rewards.frames import decode_verdict, parse_reply
from mrl.rewards.pool.process import End, WorkerProcess
from mrl.rewards.pool.queues import Batch, Lane, Task, Worker
from mrl.samples import Verdict

_log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""A reward worker that is not ready by then counts as failed."""
GRACE_SECONDS = 40.0
"""Beyond the deadline, for verifiers that keep it themselves, before their process is killed."""
WAITING_GRACE_SECONDS = 5.0
"""The same for verifiers that wait, counted from the last reply: their process ends each overdue wait itself, and one that
is silent for so long is blocked."""
_TICK_SECONDS = 0.5


class Dispatcher:
    """Owns every reward worker of a pool."""

    def __init__(self, *, retries: int, tasks_per_worker: int, idle_seconds: float) -> None:
        self._retries = retries
        self._tasks_per_worker = tasks_per_worker
        self._idle_seconds = idle_seconds
        self._lanes: list[Lane] = []
        self._arrivals: collections.deque[tuple[Lane, Task]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._stopping = self._woken = False
        self._jitter = random.Random(0)
        self._numbers = itertools.count()
        self.counts: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None
        """What ended the thread, if it ended by itself."""
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, lane: Lane, task: Task) -> None:
        """Hand in a task; called from any thread. The dispatcher sees it at its next step, at once after `wake`."""
        self._arrivals.append((lane, task))

    def stop(self, *, deadline_seconds: float = 20.0) -> None:
        """End all processes and the thread. Tasks that are still out are dropped."""
        self._stopping = True
        self.wake()
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise RewardError(f"rewards: the dispatcher did not end within {deadline_seconds:g} s")

    def wake(self) -> None:
        """One byte in the pipe is enough: `_step` forgets it before it looks at the arrivals."""
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_in, b"x")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:
            self.failure = error
            _log.exception("rewards: the dispatcher failed")
            raise
        finally:
            for lane in self._lanes:
                for worker in list(lane.workers):
                    self._end(lane, worker)
            self._selector.close()
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _step(self) -> None:
        now = time.monotonic()
        while self._arrivals:
            lane, task = self._arrivals.popleft()
            if lane not in self._lanes:
                self._lanes.append(lane)
            lane.queue.push(task)
        for lane in self._lanes:
            lane.release_delayed(now)
            self._feed(lane, now)
        for key, _ in self._selector.select(self._pause(now)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_out, 4096)
                self._woken = False
                continue
            lane, worker, what = key.data
            if worker in lane.workers:
                self._read(lane, worker, what)
        self._expire(time.monotonic())

    def _pause(self, now: float) -> float:
        unsent = any(worker.process.has_unsent for lane in self._lanes for worker in lane.workers)
        if unsent:
            return 0.002
        moments = [at for lane in self._lanes for at, _ in lane.delayed]
        moments += [
            limit for lane in self._lanes for worker in lane.workers if (limit := _limit(lane, worker))
        ]
        return max(0.0, min([_TICK_SECONDS, *(at - now for at in moments)]))

    def _feed(self, lane: Lane, now: float) -> None:
        for worker in lane.workers:
            worker.process.flush()
            while lane.has_work_for(worker, tasks_per_worker=self._tasks_per_worker):
                batch = Batch(lane.next_batch(), now)
                number = next(self._numbers)
                worker.running[number] = batch
                worker.num_sent += len(batch.tasks)
                worker.process.send((number, batch.requests))
        starting = sum(not worker.ready for worker in lane.workers)
        missing = min(len(lane.queue) - starting, lane.num_workers - len(lane.workers))
        if missing <= 0:
            return
        if now >= lane.start_again_at:
            for _ in range(missing):
                self._begin(lane, now)
        elif lane.start_failures > self._retries:
            self._give_up(lane)

    def _begin(self, lane: Lane, now: float) -> None:
        process = WorkerProcess(lane.part, lane.stage)
        worker = Worker(process, started=now)
        lane.workers.append(worker)
        self._selector.register(process.replies, selectors.EVENT_READ, (lane, worker, "replies"))
        self._selector.register(process.errors, selectors.EVENT_READ, (lane, worker, "errors"))

    def _end(self, lane: Lane, worker: Worker) -> End:
        lane.workers.remove(worker)
        for descriptor in (worker.process.replies, worker.process.errors):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        return worker.process.end()

    def _read(self, lane: Lane, worker: Worker, what: str) -> None:
        if what == "errors":
            if not worker.process.read_errors():
                self._selector.unregister(worker.process.errors)
            return
        data = worker.process.read_replies()
        if data is None:
            self._lost(lane, worker)
            return
        try:
            for payload in worker.process.buffer.feed(data):
                self._reply(lane, worker, parse_reply(payload))
        except RewardError as error:
            self._lost(lane, worker, str(error))

    def _reply(self, lane: Lane, worker: Worker, reply: dict[str, Any]) -> None:
        if not worker.ready:
            self._opening(lane, worker, reply)
            return
        number = reply.get("number")
        if not isinstance(number, int) or number not in worker.running:
            raise RewardError(f"a verifier's reply answers no open request: {str(reply)[:200]}")
        batch = worker.running.pop(number).tasks
        worker.idle_since = time.monotonic()
        if "verdicts" in reply:
            self._verdicts(lane, worker, batch, reply["verdicts"])
        elif "limit" in reply:
            self.counts["limit"] += 1
            verdict = scored(lane.part.min_reward, str(reply["limit"]))
            for task in batch:
                task.done([verdict] * len(task.requests))
        else:
            self._failed(lane, batch, str(reply.get("failed", reply))[:500], died=False)
        if worker.num_sent >= self._tasks_per_worker and not worker.running:
            self._end(lane, worker)

    def _opening(self, lane: Lane, worker: Worker, reply: dict[str, Any]) -> None:
        if "broken" in reply:
            self._start_failed(lane, worker, str(reply["broken"]))
            return
        version = str(reply.get("version", ""))
        lane.version = lane.version or version
        if version != lane.version:
            changed = (
                f"its source changed during the run (version {lane.version}, now {version}); restart the run"
            )
            self._start_failed(lane, worker, changed)
            return
        worker.ready = True
        worker.idle_since = time.monotonic()
        worker.name, worker.version = str(reply.get("ready", "")), version
        worker.capacity = lane.part.concurrency if reply.get("waits") else 1
        lane.start_failures = 0
        lane.broken_reason = ""

    def _verdicts(self, lane: Lane, worker: Worker, batch: Sequence[Task], replies: Any) -> None:
        wanted = sum(len(task.requests) for task in batch)
        if not isinstance(replies, list) or len(replies) != wanted:
            self._failed(lane, batch, f"{len(replies)} verdicts for {wanted} samples", died=False)
            return
        position = 0
        for task in batch:
            own = replies[position : position + len(task.requests)]
            position += len(task.requests)
            self._decode(lane, worker, task, own)

    def _decode(self, lane: Lane, worker: Worker, task: Task, replies: Sequence[Any]) -> None:
        verdicts: list[Verdict | None] = []
        try:
            for request, data in zip(task.requests, replies, strict=True):
                tokens = request.response_tokens
                verdicts.append(
                    decode_verdict(
                        data,
                        verifier=worker.name,
                        version=worker.version,
                        value_range=lane.part.value_range,
                        num_tokens=None if tokens is None else len(tokens),
                    )
                )
        except RewardError as error:
            self._failed(lane, (task,), str(error), died=False)
            return
        lane.successes += not task.is_control
        lane.last_good = task.requests
        if lane.next_lane is not None and verdicts == [None]:
            self.put(lane.next_lane, Task(task.requests, task.done))
            return
        task.done(verdicts)

    def _lost(self, lane: Lane, worker: Worker, reason: str = "") -> None:
        """A process that ended, or has to for the given reason."""
        end = self._end(lane, worker)
        reason = reason or end.described(lane.part.memory_mib)
        if not worker.ready:
            self._start_failed(lane, None, reason)
            return
        self.counts["processes_lost"] += 1
        self._failed(lane, worker.tasks, reason, died=True)

    def _start_failed(self, lane: Lane, worker: Worker | None, reason: str) -> None:
        if worker is not None:
            self._end(lane, worker)
        lane.start_failures += 1
        lane.broken_reason = reason
        lane.start_again_at = time.monotonic() + min(0.2 * 2**lane.start_failures, 30.0)
        self.counts["starts_failed"] += 1
        _log.warning("verifier %s: cannot start: %s", lane.label, reason)
        if lane.start_failures > self._retries:
            self._give_up(lane)

    def _give_up(self, lane: Lane) -> None:
        while lane.queue:
            task = lane.queue.pop()
            task.done(
                [no_reward(f"verifier {lane.label} cannot start: {lane.broken_reason}")] * len(task.requests)
            )

    def _expire(self, now: float) -> None:
        for lane in self._lanes:
            for worker in list(lane.workers):
                if worker.ready and not worker.running and now - worker.idle_since > self._idle_seconds:
                    self._end(lane, worker)
                    continue
                limit = _limit(lane, worker)
                if limit is None or now < limit:
                    continue
                what = (
                    f"no verdict in {lane.part.deadline_seconds:g} s" if worker.ready else "not ready in time"
                )
                self._lost(lane, worker, what)

    def _failed(self, lane: Lane, batch: Sequence[Task], reason: str, *, died: bool) -> None:
        for task in batch:
            if task.successes_at_failure < 0:
                task.successes_at_failure = lane.successes
            if len(batch) > 1:
                task.alone = True  # who of the batch it was is not known: no attempt is counted
                lane.queue.push(task)
                continue
            task.attempts += 1
            self.counts["failures"] += 1
            if task.attempts <= self._retries and not task.is_control:
                pause = 0.0 if died else 0.1 * 2**task.attempts * self._jitter.uniform(0.5, 1.5)
                lane.delayed.append((time.monotonic() + pause, task))
                continue
            self._exhausted(lane, task, reason, died=died)

    def _exhausted(self, lane: Lane, task: Task, reason: str, *, died: bool) -> None:
        lost = [no_reward(f"verifier {lane.label} failed {task.attempts} times, last: {reason}")] * len(
            task.requests
        )
        guilty = [scored(lane.part.min_reward, f"verifier {lane.label} dies of this sample: {reason}")] * len(
            task.requests
        )
        if not died or task.is_control:
            task.done(lost)
        elif lane.successes > task.successes_at_failure:
            self.counts["poisonous"] += 1
            task.done(guilty)
        elif lane.last_good is None:
            task.done(lost)
        else:
            self._control(lane, task, lost, guilty)

    def _control(self, lane: Lane, task: Task, lost: Sequence[Verdict], guilty: Sequence[Verdict]) -> None:
        """Verifies a sample again that was scored before: it tells a bad verifier from a bad sample."""

        def decide(verdicts: Sequence[Verdict | None]) -> None:
            failed = any(verdict is not None and verdict.value is None for verdict in verdicts)
            self.counts["poisonous"] += not failed
            task.done(lost if failed else guilty)

        assert lane.last_good is not None
        lane.queue.push(Task(lane.last_good, decide, alone=True, is_control=True))


def _limit(lane: Lane, worker: Worker) -> float | None:
    """When a process has to be killed; None while it has nothing to do."""
    if not worker.ready:
        return worker.started + START_SECONDS
    if not worker.running:
        return None
    oldest = next(iter(worker.running.values()))
    allowed = lane.part.deadline_seconds * (len(oldest.tasks) if lane.cheap else 1)
    allowed += GRACE_SECONDS if lane.keeps_deadline else 0.0
    if worker.capacity == 1:
        return oldest.since + allowed
    return max(oldest.since, worker.idle_since) + allowed + WAITING_GRACE_SECONDS


def lanes_of(part: RewardPart, stages: Sequence[str], *, num_workers: int) -> Lane:
    """The first lane of a verifier, each linked to the next stage's."""
    lanes = [Lane(part, stage, num_workers=num_workers) for stage in stages]
    for lane, following in itertools.pairwise(lanes):
        lane.next_lane = following
    return lanes[0]
