"""Record the rows dropped from one source by file, domain and rule, with the first few as examples."""

from __future__ import annotations

import dataclasses

SHOWN = 3
"""Example rows kept per file, domain and rule."""


@dataclasses.dataclass(slots=True)
class LeftOutRows:
    """Rows of one file and domain that one rule dropped."""

    file: str
    domain: str
    rule: str
    """The setting of section `data` that dropped them: dedupe, overlong, unusable, overlap or difficulty."""
    count: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)
    """One sentence on each of the first rows, with its place."""


class LeftOut:
    """Counts of dropped rows that grow while a source is loaded."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], LeftOutRows] = {}

    def add(self, rule: str, *, place: str, domain: str, why: str) -> None:
        """Add one row, at `place` (file:line)."""
        key = (place.rpartition(":")[0], domain, rule)
        rows = self._rows.setdefault(key, LeftOutRows(*key))
        rows.count += 1
        if rows.count <= SHOWN:
            rows.examples.append(f"{place}: {why}")

    def rows(self) -> list[LeftOutRows]:
        """Return the counts in the order of first occurrence."""
        return list(self._rows.values())
