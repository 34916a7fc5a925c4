"""Which engine answers a request; an engine here is one dp rank. Pure: knows prompts by their index, no engine."""

from __future__ import annotations

import collections


class Router:
    """Sends all unfinished requests of a prompt to one engine, whose prefix cache then holds the prompt once."""

    def __init__(self, num_engines: int, *, by_index: bool) -> None:
        """`by_index`: the engine follows from the prompt's index alone, so that a run repeats; else a prompt goes to the
        engine with the fewest unfinished requests, the first of equals."""
        self._by_index = by_index
        self._load = [0] * num_engines
        self._home: dict[int, int] = {}
        """The engine of a prompt's last request since caches were emptied: the next turn finds its context there."""
        self._preferred: dict[int, int] = {}
        """The engine of a prompt's next requests, if somebody else has chosen it."""
        self._unfinished: collections.Counter[int] = collections.Counter()
        self._serving: set[int] = set()

    @property
    def serving(self) -> list[int]:
        """The engines that take requests, in order."""
        return sorted(self._serving)

    def send(self, prompt: int) -> int:
        """Choose the engine of one more request of a prompt; at least one serves."""
        if prompt not in self._home:
            self._home[prompt] = self._choose(prompt)
        engine = self._home[prompt]
        self._unfinished[prompt] += 1
        self._load[engine] += 1
        return engine

    def prefer(self, prompt: int, engine: int) -> None:
        """Send a prompt's requests to this engine while it serves."""
        self._preferred[prompt] = engine

    def forget(self, prompt: int) -> None:
        """Send a prompt's requests where the router chooses."""
        self._preferred.pop(prompt, None)

    def ended(self, prompt: int, engine: int) -> None:
        """Note that a request of the prompt is no longer at the engine."""
        self._load[engine] -= 1
        self._unfinished[prompt] -= 1
        if not self._unfinished[prompt]:
            del self._unfinished[prompt]

    def empty_caches(self) -> None:
        """New weights: a prompt without unfinished requests may go anywhere."""
        self._home = {prompt: self._home[prompt] for prompt in self._unfinished if prompt in self._home}

    def add(self, engine: int) -> None:
        """An engine serves."""
        self._serving.add(engine)

    def remove(self, engine: int) -> None:
        """An engine is lost: its prompts may go elsewhere."""
        self._serving.discard(engine)
        self._home = {prompt: own for prompt, own in self._home.items() if own != engine}

    def _choose(self, prompt: int) -> int:
        serving = self.serving
        if (preferred := self._preferred.get(prompt)) in self._serving:
            assert preferred is not None, "None does not serve"
            return preferred
        if self._by_index:
            return serving[prompt % len(serving)]
        return min(serving, key=self._load.__getitem__)
