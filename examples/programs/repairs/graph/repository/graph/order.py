"""Orders of a graph's tasks in which each comes after what it needs."""

from __future__ import annotations

from graph.tasks import Graph


class CycleError(ValueError):
    """Tasks need each other in a circle."""

    def __init__(self, cycle: list[str]) -> None:
        super().__init__(" -> ".join(cycle))
        self.cycle = cycle
        """The tasks of the circle; each needs the one after it, and the last is the first again."""


def order(graph: Graph) -> list[str]:
    """Return all tasks in an order in which each comes after what it needs.

    Otherwise the graph's own order is kept. Raise CycleError if there is none.
    """
    done: list[str] = []
    seen = set[str]()

    def visit(name: str, path: list[str]) -> None:
        if name in seen:
            raise CycleError([*path, name])
        seen.add(name)
        for need in graph.needs(name):
            visit(need, [*path, name])
        done.append(name)

    for name in graph:
        if name not in done:
            visit(name, [])
    return done


def levels(graph: Graph) -> list[list[str]]:
    """Return lists of tasks that can run at once, each after the lists before it, as early as possible."""
    level: dict[str, int] = {}
    for name in order(graph):
        level[name] = max((level[need] + 1 for need in graph.needs(name)), default=0)
    result: list[list[str]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for name in graph:
        result[level[name]].append(name)
    return result
