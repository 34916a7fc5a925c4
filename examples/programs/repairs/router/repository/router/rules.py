"""One rule: a path with parts such as <int:year>, matched part by part."""

from __future__ import annotations

import re
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from typing import Any

CONVERTERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "str": (r"[^/]+", str),
    "int": (r"\d+", int),
    "slug": (r"[a-z0-9]+(?:-[a-z0-9]+)*", str),
    "uuid": (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid.UUID),
}
_PART = re.compile(r"<(?:(?P<kind>[a-z]+):)?(?P<name>[a-z_][a-z0-9_]*)>")


class Rule:
    """A path with named parts; a part is a whole segment of the path."""

    def __init__(self, path: str, handler: Callable[..., Any], methods: tuple[str, ...] = ("GET",)) -> None:
        if not path.startswith("/"):
            raise ValueError(f"a path starts with /: {path!r}")
        self.path, self.handler, self.methods = path, handler, methods
        self._segments = [self._segment(text) for text in path.strip("/").split("/")]
        names = [name for _, name, _ in self._segments if name]
        if len(set(names)) < len(names):
            raise ValueError(f"a name occurs twice: {path!r}")

    @property
    def weight(self) -> tuple[int, ...]:
        """Return the order in which rules are tried: fixed text before typed parts before any text."""
        order = {"": 0, "uuid": 1, "int": 1, "slug": 2, "str": 3}
        return tuple(order[kind] for kind, _, _ in self._segments)

    def match(self, path: str) -> dict[str, Any] | None:
        """Return the values of the named parts, decoded; None if the path is another."""
        segments = urllib.parse.unquote(path).strip("/").split("/")
        if len(segments) != len(self._segments):
            return None
        values: dict[str, Any] = {}
        for segment, (kind, name, text) in zip(segments, self._segments, strict=True):
            if not kind:
                if segment != text:
                    return None
                continue
            pattern, convert = CONVERTERS[kind]
            if re.fullmatch(pattern, segment, re.DOTALL) is None:
                return None
            values[name] = convert(segment)
        return values

    def build(self, values: Mapping[str, Any]) -> str:
        """Return the path with these values, encoded. Raise KeyError if one is missing."""
        segments = []
        for kind, name, text in self._segments:
            segments.append(urllib.parse.quote(str(values[name]) if kind else text))
        return "/" + "/".join(segments)

    @staticmethod
    def _segment(text: str) -> tuple[str, str, str]:
        """Return kind, name and text of a segment; fixed text has neither kind nor name."""
        match = _PART.fullmatch(text)
        if match is None:
            if "<" in text or ">" in text:
                raise ValueError(f"a part is a whole segment: {text!r}")
            return "", "", text
        kind = match["kind"] or "str"
        if kind not in CONVERTERS:
            raise ValueError(f"no converter {kind!r}")
        return kind, match["name"], ""
