"""Ranges of versions: ">=1.2.0 <2.0.0 || ^3.1.0", "~1.4.2", "1.2.3"."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from versions.version import Version

_OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CLAUSE = re.compile(r"(>=|<=|>|<|=|\^|~)?\s*([0-9A-Za-z.+-]+)")


class Range:
    """Alternatives, each of which is a list of limits."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._alternatives = [_limits(part) for part in text.split("||")]

    def __contains__(self, version: Version) -> bool:
        """Return True for a version within the limits of an alternative.

        A prerelease is in a range only if a limit of the alternative is a prerelease of the same release.
        """
        for limits in self._alternatives:
            if all(_OPERATORS[name](version, limit) for name, limit in limits):
                if not version.is_prerelease:
                    return True
                if any(limit.is_prerelease and limit.release == version.release for _, limit in limits):
                    return True
        return False

    def __repr__(self) -> str:
        return f"Range({self.text!r})"


def newest(versions: Iterable[Version], allowed: Range) -> Version | None:
    """Return the newest version of a range, or None."""
    return max((version for version in versions if version in allowed), default=None)


def _limits(text: str) -> list[tuple[str, Version]]:
    text = text.strip()
    if text in ("", "*"):
        return []
    limits: list[tuple[str, Version]] = []
    position = 0
    while position < len(text):
        match = _CLAUSE.match(text, position)
        if match is None:
            raise ValueError(f"not a range: {text!r}")
        name, version = match[1] or "=", Version(match[2])
        if name == "^":
            limits += [(">=", version), ("<", version.next_major())]
        elif name == "~":
            limits += [(">=", version), ("<", version.next_minor())]
        else:
            limits.append((name, version))
        position = match.end()
        while position < len(text) and text[position] in " ,":
            position += 1
    return limits
