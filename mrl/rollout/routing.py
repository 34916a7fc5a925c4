"""Which engine answers a request, or which dp rank where engines have several: an engine here is either. Pure: knows prompts
by their index, no engine."""

from __future__ import annotations

import collections
from collections.abc import Collection


class Router:
    """Sends all of a prompt's unfinished requests to one engine, whose prefix cache then holds the prompt once."""

    def __init__(self, num_engines: int, *, by_index: bool) -> None:
        """`by_index`: the engine follows from the prompt's index alone, so that a run repeats; else a prompt goes to the
        engine with the fewest unfinished requests, the first of equals."""
        self._by_index = by_index
        self._load = [0] * num_engines
        self._held = [0] * num_engines
        self._engine_of: dict[int, int] = {}
        self._home: dict[int, int] = {}
        """The engine that had a prompt's last request since the last park: an episode's next turn finds its cache there."""
        self._unfinished: collections.Counter[int] = collections.Counter()
        self._lost: set[int] = set()

    def send(self, prompt: int, num_requests: int) -> int:
        """The prompt's engine, which has so many more unfinished requests from here on."""
        if prompt not in self._engine_of:
            self._engine_of[prompt] = self._choose(prompt)
        engine = self._engine_of[prompt]
        self._unfinished[prompt] += num_requests
        self._load[engine] += num_requests
        return engine

    def ended(self, prompt: int) -> None:
        """A request of the prompt came back, finished or parked; without any other the prompt may go elsewhere after a park,
        when caches are empty."""
        self._load[self._engine_of[prompt]] -= 1
        self._unfinished[prompt] -= 1
        if not self._unfinished[prompt]:
            del self._unfinished[prompt]
            self._home[prompt] = self._engine_of.pop(prompt)

    def engine_of(self, prompt: int) -> int | None:
        """The engine of a prompt's unfinished requests; None without any."""
        return self._engine_of.get(prompt)

    def load(self, engine: int) -> int:
        """Unfinished requests that an engine works at."""
        return self._load[engine]

    def hold(self, at_home: Collection[int] = ()) -> None:
        """All unfinished requests wait in their engines, until `go_on`. Caches are emptied but for these prompts'."""
        self._home = {prompt: self._home[prompt] for prompt in at_home if prompt in self._home}
        self._held = [held + load for held, load in zip(self._held, self._load, strict=True)]
        self._load = [0] * len(self._load)

    def go_on(self) -> None:
        self._load = [held + load for held, load in zip(self._held, self._load, strict=True)]
        self._held = [0] * len(self._held)

    def lose(self, engine: int) -> None:
        """An engine is gone with all that it had: its prompts may go elsewhere, and nothing comes to it until `regain`."""
        self._lost.add(engine)
        self._load[engine] = self._held[engine] = 0
        for prompt in [prompt for prompt, own in self._engine_of.items() if own == engine]:
            del self._engine_of[prompt], self._unfinished[prompt]
        self._home = {prompt: own for prompt, own in self._home.items() if own != engine}

    def regain(self, engine: int) -> None:
        """Another engine has the place of one that was lost."""
        self._lost.discard(engine)

    def _choose(self, prompt: int) -> int:
        left = [engine for engine in range(len(self._load)) if engine not in self._lost]
        if self._by_index:
            return left[prompt % len(left)]
        return self._home.get(prompt, min(left, key=self._load.__getitem__))
