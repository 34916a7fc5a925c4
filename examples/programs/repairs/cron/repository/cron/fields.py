"""Fields of a line: lists of numbers, ranges, steps and names."""

from __future__ import annotations

import dataclasses

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


@dataclasses.dataclass(frozen=True)
class Field:
    """Values that a field allows."""

    values: frozenset[int]
    is_any: bool
    """The field is a star."""

    def __contains__(self, value: int) -> bool:
        return value in self.values


@dataclasses.dataclass(frozen=True)
class FieldKind:
    """Limits and names of one field."""

    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()

    def parse(self, text: str) -> Field:
        """Read a field; ValueError if it is not valid."""
        values: set[int] = set()
        for part in text.split(","):
            values.update(self._part(part))
        if self.names == DAYS and 7 in values:  # Sunday has two numbers
            values = (values - {7}) | {0}
        return Field(frozenset(values), text == "*")

    def _part(self, part: str) -> range:
        span, _, step = part.partition("/")
        if step and (not step.isdigit() or int(step) == 0):
            raise ValueError(f"{self.name}: a step must be a positive number, not {step!r}")
        if span == "*":
            first, last = self.first, self.last
        elif "-" in span:
            first, last = (self._number(end) for end in span.split("-", 1))
        else:
            first = self._number(span)
            last = self.last if step else first
        if first > last:
            raise ValueError(f"{self.name}: {span} runs backwards")
        return range(first, last + 1, int(step or 1))

    def _number(self, text: str) -> int:
        if text.lower() in self.names:
            return self.names.index(text.lower()) + (1 if self.names == MONTHS else 0)
        if not text.isdigit():
            raise ValueError(f"{self.name}: {text!r} is not a number")
        number = int(text)
        last = 7 if self.names == DAYS else self.last
        if not self.first <= number <= last:
            raise ValueError(f"{self.name}: {number} is not between {self.first} and {last}")
        return number


KINDS = (
    FieldKind("minute", 0, 59),
    FieldKind("hour", 0, 23),
    FieldKind("day", 1, 31),
    FieldKind("month", 1, 12, MONTHS),
    FieldKind("weekday", 0, 6, DAYS),
)
