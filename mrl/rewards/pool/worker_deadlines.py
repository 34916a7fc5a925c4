"""Deadlines of workers and the times to check them. A deadline counts own time (without waits for a CPU)."""

from __future__ import annotations

from mrl.processes.own_time import PATIENCE_SECONDS
from mrl.rewards.contract import Stage
from mrl.rewards.pool.work import AttemptFailure, Cause, Worker

UNWATCHED_SECONDS = 0.25
"""Shorter work is not measured, because measuring CPU use costs as much as a short verdict; the deadline of
longer work counts from the first measurement."""
START_SECONDS = 60.0
"""A reward worker that is not ready by then counts as failed."""
GRACE_SECONDS = PATIENCE_SECONDS + 15.0
"""Grace after the deadline for verifiers that keep it themselves; none for one that only computes."""
WAITING_GRACE_SECONDS = 5.0
"""Grace after the deadline and the last reply for verifiers that wait: their worker ends overdue waits
itself, so one that is silent for longer is blocked."""


class WorkerDeadlines:
    """Deadlines of one stage's workers: for their start and for their work."""

    def __init__(self, seconds: float, stage: Stage) -> None:
        """`seconds`: the deadline of a verdict."""
        self._seconds, self._stage = seconds, stage

    def next_look(self, worker: Worker) -> float | None:
        """Return when to check the worker next (monotonic seconds); None if it is idle."""
        return self._look_at(worker) or self._limit(worker)

    def starts_to_watch(self, worker: Worker, now: float) -> bool:
        """Return True, and set `watched_from`, if the worker's work has become long enough to measure."""
        at = self._look_at(worker)
        if at is None or now < at:
            return False
        worker.watched_from = now
        return True

    def _look_at(self, worker: Worker) -> float | None:
        """Return when to start measuring; None if it has started or nothing runs."""
        if not worker.running or worker.watched_from:
            return None
        return next(iter(worker.running.values())).since + UNWATCHED_SECONDS

    def is_late(self, worker: Worker, now: float) -> bool:
        """Return True if the deadline is over by the clock, so that the worker's CPU use must be measured."""
        if not worker.ready:
            return now >= worker.started + START_SECONDS
        since = self._since(worker)
        return since is not None and now >= since + self._seconds

    def overdue(self, worker: Worker, now: float) -> AttemptFailure | None:
        """Return why the worker must be killed; None if it may continue."""
        seconds = self._seconds
        limit = self._limit(worker)
        if limit is None:
            return None
        if not worker.ready:
            return AttemptFailure(Cause.DIED, "not ready in time") if now >= limit else None
        if worker.used.computed >= seconds and worker.capacity == 1:
            return AttemptFailure(Cause.COMPUTED, f"no verdict in {seconds:g} s, computing")
        patience = PATIENCE_SECONDS - min(worker.used.starved, PATIENCE_SECONDS)
        if now < limit or (not worker.used.is_known and now < limit + patience):
            return None
        if not worker.used.is_known or not patience:
            return AttemptFailure(Cause.STARVED, "starved: the machine gave its process no processor")
        is_busy = worker.used.computed >= seconds / 2 and worker.capacity == 1
        return AttemptFailure(Cause.COMPUTED if is_busy else Cause.DIED, f"no verdict in {seconds:g} s")

    def _since(self, worker: Worker) -> float | None:
        """Return the start of the deadline."""
        if not worker.running:
            return None
        oldest = max(next(iter(worker.running.values())).since, worker.watched_from)
        return oldest if worker.capacity == 1 else max(oldest, worker.idle_since)

    def _limit(self, worker: Worker) -> float | None:
        if not worker.ready:
            return worker.started + START_SECONDS
        since = self._since(worker)
        if since is None:
            return None
        allowed = self._seconds + min(worker.used.starved, PATIENCE_SECONDS)
        if worker.capacity > 1:
            return since + allowed + WAITING_GRACE_SECONDS
        return since + allowed + (GRACE_SECONDS if self._stage.keeps_deadline else 0.0)
