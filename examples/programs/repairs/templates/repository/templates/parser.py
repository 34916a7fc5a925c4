"""Templates from text: {{ value | filter }}, {% for x in xs %}, {% if x %}, {% else %}, {% end %}."""

from __future__ import annotations

import re
from typing import Any

from templates.nodes import Condition, Expression, Loop, Node, TemplateError, Text
from templates.scope import Scope

_TAG = re.compile(r"({{.*?}}|{%.*?%})", re.DOTALL)
_FOR = re.compile(r"for\s+(\w+)\s+in\s+(.+)")
_IF = re.compile(r"if\s+(not\s+)?(.+)")


class Template:
    """A parsed template, which can be rendered many times."""

    def __init__(self, text: str) -> None:
        self._pieces = [piece for piece in _TAG.split(text) if piece]
        self._position = 0
        self._nodes, end = self._block()
        if end:
            raise TemplateError(f"{{% {end} %}} without a beginning")

    def render(self, **values: Any) -> str:
        """Return the text with these values."""
        scope = Scope(values)
        return "".join(node.render(scope) for node in self._nodes)

    def _block(self) -> tuple[list[Node], str]:
        """Parse up to the tag that ends a block; return its nodes and that tag."""
        nodes: list[Node] = []
        while self._position < len(self._pieces):
            piece = self._pieces[self._position]
            self._position += 1
            if piece.startswith("{{"):
                nodes.append(Expression(piece[2:-2].strip()))
            elif piece.startswith("{%"):
                tag = piece[2:-2].strip()
                if tag in ("end", "else"):
                    return nodes, tag
                nodes.append(self._tag(tag))
            else:
                nodes.append(Text(piece))
        return nodes, ""

    def _tag(self, tag: str) -> Node:
        if match := _FOR.fullmatch(tag):
            body, end = self._block()
            if end != "end":
                raise TemplateError(f"{{% {tag} %}} is not ended")
            return Loop(match[1], Expression(match[2]), body)
        if match := _IF.fullmatch(tag):
            body, end = self._block()
            otherwise: list[Node] = []
            if end == "else":
                otherwise, end = self._block()
            if end != "end":
                raise TemplateError(f"{{% {tag} %}} is not ended")
            return Condition(Expression(match[2]), bool(match[1]), body, otherwise)
        raise TemplateError(f"unknown tag: {tag}")
