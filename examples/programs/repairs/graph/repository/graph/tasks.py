"""A graph of tasks, from code or from lines such as "test: build lint"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


class Graph:
    """Tasks by name, each with the tasks that it needs."""

    def __init__(self, needs: Mapping[str, Iterable[str]] | None = None) -> None:
        self._needs: dict[str, list[str]] = {}
        for name, others in (needs or {}).items():
            self.add(name, *others)

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Read lines "name: need need"; # starts a comment."""
        graph = cls()
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            name, colon, others = line.partition(":")
            if not colon or not name.strip() or " " in name.strip():
                raise ValueError(f"line {number}: expected 'name: needs', found {line!r}")
            graph.add(name.strip(), *others.split())
        return graph

    def add(self, name: str, *needs: str) -> None:
        """Add a task, or needs of a task. What is needed becomes a task too."""
        known = self._needs.setdefault(name, [])
        for other in needs:
            self._needs.setdefault(other, [])
            if other not in known:
                known.append(other)

    def __contains__(self, name: str) -> bool:
        return name in self._needs

    def __iter__(self) -> Iterator[str]:
        return iter(self._needs)

    def __len__(self) -> int:
        return len(self._needs)

    def needs(self, name: str) -> list[str]:
        """Return the tasks that one needs directly. Raise KeyError if there is no such task."""
        return list(self._needs[name])

    def users(self, name: str) -> list[str]:
        """Return the tasks that need one directly."""
        return [other for other, needs in self._needs.items() if name in needs]

    def affected(self, changed: Iterable[str]) -> set[str]:
        """Return the tasks that must run again: those that changed, and all that need one of them."""
        reached, waiting = set[str](), list(changed)
        while waiting:
            name = waiting.pop()
            if name not in self._needs:
                raise KeyError(name)
            if name not in reached:
                reached.add(name)
                waiting += self.users(name)
        return reached

    def part(self, *goals: str) -> Graph:
        """Return the graph of some tasks and of all that they need."""
        reached: dict[str, list[str]] = {}
        waiting = list(goals)
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached[name] = self.needs(name)
                waiting += reached[name]
        return Graph({name: reached[name] for name in self if name in reached})
