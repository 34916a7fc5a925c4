"""What was left out of one source, by file, domain and rule, with the first few rows of each."""

from __future__ import annotations

import dataclasses

SHOWN = 3
"""Rows that are kept as examples of a file, domain and rule."""


@dataclasses.dataclass(slots=True)
class LeftOutRows:
    """Rows of one file and domain that one rule left out."""

    file: str
    domain: str
    rule: str
    """The setting of section `data` that says so: dedupe, overlong, unusable, overlap or difficulty."""
    count: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)
    """Sentences on the first of them, each with its place."""


class LeftOut:
    """Counts that grow while a source is loaded."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], LeftOutRows] = {}

    def add(self, rule: str, *, place: str, domain: str, why: str) -> None:
        """One row, at `place` (file:line)."""
        key = (place.rpartition(":")[0], domain, rule)
        rows = self._rows.setdefault(key, LeftOutRows(*key))
        rows.count += 1
        if rows.count <= SHOWN:
            rows.examples.append(f"{place}: {why}")

    def rows(self) -> list[LeftOutRows]:
        """In the order in which they were first met."""
        return list(self._rows.values())
