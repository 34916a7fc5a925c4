"""Requests that an engine has taken and not begun: vLLM gets as many as it runs at once, the rest wait here. Pure.

What waits has no token, so that it need not leave the engine for a weight sync: only what is running is parked.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from mrl.rollout.request import GenerationRequest, sample_of


class WaitingQueue:
    """In the order of prompts and samples, whenever they came: a request that goes on comes before those that begin, and
    a validation's, whose prompts have negative indices, before all."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, GenerationRequest]] = []
        self._held: list[tuple[tuple[int, int], int, GenerationRequest]] = []
        self._ids: set[str] = set()
        self._num_added = 0

    def __len__(self) -> int:
        """Those that may be begun."""
        return len(self._heap)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._num_added += 1
            self._ids.add(request.request_id)
            heapq.heappush(self._heap, (sample_of(request.request_id), self._num_added, request))

    def first(self) -> list[str]:
        """The next one's id, where there is one."""
        return [request.request_id for *_, request in self._heap[:1]]

    def take(self, count: int) -> list[GenerationRequest]:
        """The next `count`, fewer where fewer may be begun."""
        taken = [heapq.heappop(self._heap)[-1] for _ in range(min(count, len(self._heap)))]
        self._ids.difference_update(request.request_id for request in taken)
        return taken

    def hold(self) -> None:
        """None that is there now may be begun before `go_on`."""
        self._held += self._heap
        self._heap = []

    def go_on(self) -> None:
        self._heap += self._held
        self._held = []
        heapq.heapify(self._heap)

    def remove(self, request_ids: Collection[str]) -> list[str]:
        """Forgets requests; the ids of those that were there."""
        gone = [request_id for request_id in request_ids if request_id in self._ids]
        self._ids.difference_update(gone)
        self._heap, self._held = (
            [entry for entry in entries if entry[-1].request_id in self._ids]
            for entries in (self._heap, self._held)
        )
        heapq.heapify(self._heap)
        return gone
