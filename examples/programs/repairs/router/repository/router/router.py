"""The router: rules, tried from the most to the least specific."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.rules import Rule


class NotFound(LookupError):
    """No rule has this path, or none with this method."""

    def __init__(self, path: str, allowed: set[str]) -> None:
        super().__init__(f"{path}: only {', '.join(sorted(allowed))}" if allowed else path)
        self.allowed = allowed

    @property
    def status(self) -> int:
        """Return HTTP's status: 405 if the path exists with another method."""
        return 405 if self.allowed else 404


class Router:
    """A list of rules with names."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._by_name: dict[str, Rule] = {}

    def add(
        self, path: str, handler: Callable[..., Any], *, methods: tuple[str, ...] = ("GET",), name: str = ""
    ) -> Rule:
        """Add a rule. Rules of the same weight are tried in the order in which they were added."""
        rule = Rule(path, handler, methods)
        self._rules.append(rule)
        self._rules.sort(key=lambda one: one.weight)
        self._by_name[name or getattr(handler, "__name__", path)] = rule
        return rule

    def find(self, path: str, method: str = "GET") -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return a handler and its arguments; NotFound if there is none."""
        path = path.split("?", 1)[0]
        allowed: set[str] = set()
        for rule in self._rules:
            values = rule.match(path)
            if values is None:
                continue
            if method in rule.methods:
                return rule.handler, values
            allowed.update(rule.methods)
        raise NotFound(path, allowed)

    def dispatch(self, path: str, method: str = "GET") -> Any:
        """Call the handler of a path."""
        handler, values = self.find(path, method)
        return handler(**values)

    def url(self, name: str, /, **values: Any) -> str:
        """Return the path of a named rule."""
        return self._by_name[name].build(values)
