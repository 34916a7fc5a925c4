"""Parts of a template, and how each becomes text."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from templates.scope import Scope

FILTERS: dict[str, Callable[[Any], Any]] = {
    "upper": lambda value: str(value).upper(),
    "lower": lambda value: str(value).lower(),
    "title": lambda value: str(value).title(),
    "trim": lambda value: str(value).strip(),
    "length": len,
    "escape": lambda value: html.escape(str(value)),
}


class TemplateError(ValueError):
    """A template is malformed, or a value is missing."""


class Node(Protocol):
    def render(self, scope: Scope) -> str: ...


@dataclasses.dataclass(frozen=True)
class Text:
    text: str

    def render(self, scope: Scope) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Expression:
    """A path or a quoted text, and the filters that it goes through."""

    source: str

    def value(self, scope: Scope) -> Any:
        first, *filters = split_filters(self.source)
        if len(first) >= 2 and first[0] == first[-1] and first[0] in "\"'":
            value: Any = first[1:-1]
        else:
            try:
                value = scope.find(first)
            except KeyError as error:
                raise TemplateError(f"{first}: there is no {error.args[0]}") from error
        for name in filters:
            if name not in FILTERS:
                raise TemplateError(f"no filter {name!r}")
            value = FILTERS[name](value)
        return value

    def render(self, scope: Scope) -> str:
        value = self.value(scope)
        return "" if value is None else str(value)


@dataclasses.dataclass(frozen=True)
class Condition:
    condition: Expression
    negated: bool
    body: Sequence[Node]
    otherwise: Sequence[Node]

    def render(self, scope: Scope) -> str:
        holds = bool(self.condition.value(scope)) is not self.negated
        return "".join(node.render(scope) for node in (self.body if holds else self.otherwise))


@dataclasses.dataclass(frozen=True)
class Loop:
    name: str
    rows: Expression
    body: Sequence[Node]

    def render(self, scope: Scope) -> str:
        parts = []
        for number, row in enumerate(self.rows.value(scope), start=1):
            inner = scope.inner(**{self.name: row, "number": number})
            parts += [node.render(inner) for node in self.body]
        return "".join(parts)


def split_filters(source: str) -> list[str]:
    """Split an expression at its bars."""
    return [part.strip() for part in source.split("|")]
