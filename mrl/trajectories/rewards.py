"""Verdicts for coroutines: samples go to reward workers once per loop iteration; verdicts return in batches.

A thread submits the samples, because reward workers block their callers while they have too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from mrl.samples import Prompt, Sample, Verdict

_CHECK_SECONDS = 1.0
_GATHER_SECONDS = 0.02
"""Time to collect further verdicts after the first."""

Deliver = Callable[[str, Verdict], None]
"""Takes a sample's id and its verdict, in any thread."""


_Batch = tuple[list[tuple[Sample, Prompt]], set[int]]
"""Samples to submit, then prompts whose groups are complete."""


class RewardWorkers(Protocol):
    """Verifiers of a run (mrl/rewards/pool)."""

    def deliver_to(self, deliver: Deliver) -> None:
        """Pass every further verdict to `deliver` as it arrives."""
        ...

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None: ...

    def flush_groups(self, prompts: Collection[int]) -> None:
        """Start group verifiers on the incomplete groups of these prompts."""
        ...

    def check(self) -> None:
        """Raise the error that ends the run, if there is one."""
        ...


class RewardClient:
    """Client of a run's reward workers. All methods belong to one event loop."""

    def __init__(self, workers: RewardWorkers, *, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure`: called in the loop with the error of a reward worker or of the submitting thread."""
        self._workers, self._on_failure = workers, on_failure
        self._loop = asyncio.get_running_loop()
        self._futures: dict[str, asyncio.Future[Verdict]] = {}
        self._outbox: list[tuple[Sample, Prompt]] = []
        self._flushes: set[int] = set()
        self._delivered: list[tuple[str, Verdict]] = []
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        workers.deliver_to(self._deliver)
        self._thread = threading.Thread(target=self._hand_in, name="rewards-out", daemon=True)
        self._thread.start()

    def score(self, sample: Sample, prompt: Prompt) -> asyncio.Future[Verdict]:
        """Return the future of a sample's verdict."""
        future: asyncio.Future[Verdict] = self._loop.create_future()
        self._futures[sample.sample_id] = future
        self._outbox.append((sample, prompt))
        self._send_soon()
        return future

    def flush(self, prompt: int) -> None:
        """Start group verifiers on this prompt's samples: no more will come."""
        self._flushes.add(prompt)
        self._send_soon()

    def close(self) -> None:
        """End the thread; samples without a verdict stay without."""
        self._batches.put(None)
        self._thread.join(30.0)

    def _send_soon(self) -> None:
        if len(self._outbox) + len(self._flushes) == 1:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        if self._outbox or self._flushes:
            self._batches.put((self._outbox, self._flushes))
            self._outbox, self._flushes = [], set()

    def _hand_in(self) -> None:
        """Submit batches; the thread's main function."""
        try:
            while (batch := self._next_batch()) is not None:
                pairs, prompts = batch
                if pairs:
                    self._workers.submit_all(pairs)
                if prompts:
                    self._workers.flush_groups(prompts)
        except BaseException as error:  # any error: no verdict would come
            self._loop.call_soon_threadsafe(self._on_failure, error)

    def _next_batch(self) -> _Batch | None:
        while True:
            try:
                return self._batches.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                self._workers.check()

    def _deliver(self, sample_id: str, verdict: Verdict) -> None:
        """Store a verdict, in a thread of the reward workers; resolve soon, or at once if it is the last."""
        with self._lock:
            self._delivered.append((sample_id, verdict))
            count = len(self._delivered)
        if count == len(self._futures):
            self._call(self._resolve)
        elif count == 1:
            self._call(self._resolve_soon)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended
            self._loop.call_soon_threadsafe(function)

    def _resolve_soon(self) -> None:
        self._loop.call_later(_GATHER_SECONDS, self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            delivered, self._delivered = self._delivered, []
        for sample_id, verdict in delivered:
            future = self._futures.pop(sample_id, None)
            if future is not None and not future.done():
                future.set_result(verdict)
