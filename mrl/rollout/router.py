"""Choice of an engine (here: one dp rank) for each request, by the prompt's index. Knows no engine."""

from __future__ import annotations

import collections


class Router:
    """Router of a prompt's unfinished requests to one engine, whose prefix cache then has the prompt once."""

    def __init__(self, num_engines: int, *, by_index: bool) -> None:
        """`by_index`: choose by the prompt's index alone, so that a run is reproducible; else choose the
        first engine with the fewest unfinished requests."""
        self._by_index = by_index
        self._load = [0] * num_engines
        self._home: dict[int, int] = {}
        """Engine of a prompt's last request since the caches were emptied; it has cached the context."""
        self._preferred: dict[int, int] = {}
        """Engine of a prompt's next requests, if set by `prefer`."""
        self._unfinished: collections.Counter[int] = collections.Counter()
        self._serving: set[int] = set()

    @property
    def serving(self) -> list[int]:
        """Engines that take requests, in order."""
        return sorted(self._serving)

    def send(self, prompt: int) -> int:
        """Return the engine for one more request of a prompt; at least one must serve."""
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
        """Undo `prefer`."""
        self._preferred.pop(prompt, None)

    def ended(self, prompt: int, engine: int) -> None:
        """Record that a request of the prompt left the engine."""
        self._load[engine] -= 1
        self._unfinished[prompt] -= 1
        if not self._unfinished[prompt]:
            del self._unfinished[prompt]

    def empty_caches(self) -> None:
        """Let prompts without unfinished requests change engines, because new weights emptied the caches."""
        self._home = {prompt: self._home[prompt] for prompt in self._unfinished if prompt in self._home}

    def add(self, engine: int) -> None:
        """Add an engine that serves."""
        self._serving.add(engine)

    def remove(self, engine: int) -> None:
        """Remove a lost engine; its prompts may go elsewhere."""
        self._serving.discard(engine)
        self._home = {prompt: home for prompt, home in self._home.items() if home != engine}

    def _choose(self, prompt: int) -> int:
        serving = self.serving
        if (preferred := self._preferred.get(prompt)) in self._serving:
            assert preferred is not None, "None does not serve"
            return preferred
        if self._by_index:
            return serving[prompt % len(serving)]
        return min(serving, key=self._load.__getitem__)
