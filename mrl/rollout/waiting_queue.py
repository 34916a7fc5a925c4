"""Requests that an engine has accepted but not started: vLLM gets only as many as it runs at once."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from mrl.rollout.request import GenerationRequest
from mrl.rollout.seeds import sample_of

ALL, TRAINING, NOTHING = -(1 << 62), 0, 1 << 62
"""First prompt index to hold: all requests, those of training, none."""
_Entry = tuple[tuple[int, int], int, GenerationRequest]


class WaitingQueue:
    """Queue ordered by prompt and sample, whatever the arrival order, so that interrupted requests precede
    new ones and those of a validation run (negative prompt indices) come first."""

    def __init__(self) -> None:
        self._ready: list[_Entry] = []
        self._held: list[_Entry] = []
        self._ids: set[str] = set()
        self._num_added = 0
        self._held_from = NOTHING

    def __len__(self) -> int:
        """Return the number of requests that may start."""
        return len(self._ready)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._num_added += 1
            self._ids.add(request.request_id)
            self._push((sample_of(request.request_id), self._num_added, request))

    def take(self, count: int) -> list[GenerationRequest]:
        """Remove and return the next `count` requests, fewer if fewer may start."""
        taken = [heapq.heappop(self._ready)[-1] for _ in range(min(count, len(self._ready)))]
        self._ids.difference_update(request.request_id for request in taken)
        return taken

    def hold(self, from_prompt: int) -> None:
        """Hold the present and future requests of prompts from this index on; others may start."""
        self._held_from = from_prompt
        entries, self._ready, self._held = self._ready + self._held, [], []
        for entry in entries:
            self._push(entry)

    def remove(self, request_ids: Collection[str]) -> list[str]:
        """Forget requests; return the ids of those that were queued."""
        removed = [request_id for request_id in request_ids if request_id in self._ids]
        self._ids.difference_update(removed)
        self._ready, self._held = (
            [entry for entry in entries if entry[-1].request_id in self._ids]
            for entries in (self._ready, self._held)
        )
        heapq.heapify(self._ready)
        return removed

    def _push(self, entry: _Entry) -> None:
        if entry[0][0] >= self._held_from:
            self._held.append(entry)
        else:
            heapq.heappush(self._ready, entry)
