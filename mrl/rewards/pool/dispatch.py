"""Thread that drives reward workers.

consumes      tasks for queues
produces      calls of each task's `done`, exactly once
waits for     replies, worker exits and deadlines, in one place and always with a timeout
unblocked by  a byte on the wake-up pipe

A worker that dies, hangs or breaks its contract is killed by pid and replaced; `queues` handles its tasks.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from typing import Any

from mrl.errors import RewardError
from mrl.processes.framing import BadReply
from mrl.processes.worker_process import WorkerExit, WorkerProcess
from mrl.rewards.pool.queues import StageQueue
from mrl.rewards.pool.work import AttemptFailure, Cause, Task, Worker

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_LEAST_SECONDS = 0.02
"""Shortest interval between two checks of a late worker that waits for a CPU."""
_NO_MEMORY = ("MemoryError", "bad_alloc", "allocate", "allocation", "out of memory")
"""Words of interpreters' and libraries' out-of-memory errors."""


class Dispatcher:
    """Owner of every reward worker of a pool."""

    def __init__(self) -> None:
        self._queues: list[StageQueue] = []
        self._arrivals: collections.deque[tuple[StageQueue, Task]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._stopping = self._woken = False
        self.failure: BaseException | None = None
        """Error that ended the thread, if any."""
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def start(self) -> None:
        """Start the thread; workers end with it."""
        self._thread.start()

    def put(self, queue: StageQueue, task: Task) -> None:
        """Add a task for the dispatcher's next step, which `wake` starts at once. Thread-safe."""
        self._arrivals.append((queue, task))

    def stop(self, *, deadline_seconds: float = 20.0) -> None:
        """End all workers and the thread. Open tasks are dropped."""
        self._stopping = True
        self.wake()
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise RewardError(f"rewards: the dispatcher did not end within {deadline_seconds:g} s")

    def wake(self) -> None:
        """Wake the thread. One byte is enough: `_step` reads it before it looks at the arrivals."""
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
            for queue in self._queues:
                for worker in list(queue.workers):
                    self._end(queue, worker)
            self._selector.close()
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _step(self) -> None:
        now = time.monotonic()
        while self._arrivals:
            queue, task = self._arrivals.popleft()
            self._add(queue)
            queue.put(task)
        for queue in self._queues:
            queue.release_delayed(now)
            self._feed(queue, now)
        for key, _ in self._selector.select(self._timeout(now)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_out, 4096)
                self._woken = False
                continue
            queue, worker, channel = key.data
            if worker in queue.workers:
                self._read(queue, worker, channel)
        self._expire(time.monotonic())

    def _add(self, queue: StageQueue | None) -> None:
        """Register a new queue and those of the following stages."""
        while queue is not None and queue not in self._queues:
            self._queues.append(queue)
            queue = queue.following

    def _timeout(self, now: float) -> float:
        if any(worker.process.has_unsent for queue in self._queues for worker in queue.workers):
            return 0.002
        events = [at for queue in self._queues for at in queue.next_event()]
        return max(_LEAST_SECONDS, min([_TICK_SECONDS, *(at - now for at in events)]))

    def _feed(self, queue: StageQueue, now: float) -> None:
        for worker in queue.workers:
            worker.process.flush()
            while (batch := queue.next_batch(worker, now)) is not None:
                worker.process.send((batch.number, batch.requests))
        for _ in range(queue.num_to_start(now)):
            self._begin(queue, now)

    def _begin(self, queue: StageQueue, now: float) -> None:
        worker = Worker(WorkerProcess("mrl.rewards.pool.reward_worker"), started=now)
        worker.process.send((queue.kind, queue.stage))
        queue.workers.append(worker)
        process = worker.process
        self._selector.register(process.replies, selectors.EVENT_READ, (queue, worker, "replies"))
        self._selector.register(process.errors, selectors.EVENT_READ, (queue, worker, "errors"))

    def _end(self, queue: StageQueue, worker: Worker) -> WorkerExit:
        queue.workers.remove(worker)
        for descriptor in (worker.process.replies, worker.process.errors):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        return worker.process.end()

    def _read(self, queue: StageQueue, worker: Worker, channel: str) -> None:
        if channel == "errors":
            if not worker.process.read_errors():
                self._selector.unregister(worker.process.errors)
            return
        try:
            for reply in worker.process.read_replies():
                self._reply(queue, worker, reply)
                if worker not in queue.workers:
                    return  # output after its last reply is not read
        except EOFError:
            self._lose(queue, worker)
        except (BadReply, RewardError) as error:
            self._lose(queue, worker, AttemptFailure(Cause.DIED, str(error)))

    def _reply(self, queue: StageQueue, worker: Worker, reply: dict[str, Any]) -> None:
        if worker.ready:
            queue.replied(worker, reply)
            if queue.is_spent(worker):
                self._end(queue, worker)
        elif fault := queue.opened(worker, reply):
            self._end(queue, worker)
            queue.start_failed(fault)

    def _lose(self, queue: StageQueue, worker: Worker, fault: AttemptFailure | None = None) -> None:
        """Remove a worker that died, or kill it because of `fault`."""
        end = self._end(queue, worker)
        queue.lost(worker, fault or AttemptFailure(Cause.DIED, _described(end, queue.part.memory_mib)))

    def _expire(self, now: float) -> None:
        for queue in self._queues:
            for worker in list(queue.workers):
                if queue.is_idle(worker, now):
                    self._end(queue, worker)
                elif queue.deadlines.starts_to_watch(worker, now):
                    worker.process.begin()
                elif queue.deadlines.is_late(worker, now):
                    worker.used = worker.process.used()
                    if fault := queue.deadlines.overdue(worker, now):
                        self._lose(queue, worker, fault)


def _described(end: WorkerExit, memory_mib: int) -> str:
    """Return exit status and last output, and the memory limit's setting if that may have been the cause."""
    text = f"its process ended with status {end.status}: {end.stderr_tail}"
    out_of_memory = any(words in end.stderr_tail for words in _NO_MEMORY)
    if out_of_memory or end.status == -signal.SIGKILL:  # possibly the kernel's out-of-memory killer
        text += f" (reward.memory_mib = {memory_mib} is what it may allocate)"
    return text
