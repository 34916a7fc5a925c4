"""A schedule, and when it is due."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from cron.fields import KINDS

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_LONGEST = datetime.timedelta(days=366 * 8)


class Schedule:
    """Five fields: minute, hour, day of the month, month, day of the week.

    If the day of the month and the day of the week are both restricted, a day is due if either of them
    allows it. If one of them is a star, the other decides.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        words = _ALIASES.get(line.strip(), line).split()
        if len(words) != len(KINDS):
            raise ValueError(f"expected {len(KINDS)} fields, found {len(words)}: {line!r}")
        self._minute, self._hour, self._day, self._month, self._weekday = (
            kind.parse(word) for kind, word in zip(KINDS, words, strict=True)
        )

    def __repr__(self) -> str:
        return f"Schedule({self.line!r})"

    def is_due(self, time: datetime.datetime) -> bool:
        """Return True if a job starts in this minute."""
        return time.minute in self._minute and time.hour in self._hour and self._allows(time.date())

    def next(self, after: datetime.datetime) -> datetime.datetime:
        """Return the first due minute after a time. Raise ValueError if there is none in eight years."""
        time = after.replace(second=0, microsecond=0) + datetime.timedelta(minutes=1)
        while time - after < _LONGEST:
            if not self._allows(time.date()):
                time = datetime.datetime.combine(
                    time.date() + datetime.timedelta(days=1), datetime.time(), time.tzinfo
                )
            elif time.hour not in self._hour:
                time = time.replace(minute=0) + datetime.timedelta(hours=1)
            elif time.minute not in self._minute:
                time += datetime.timedelta(minutes=1)
            else:
                return time
        raise ValueError(f"{self.line!r} is never due")

    def times(self, after: datetime.datetime, count: int) -> Iterator[datetime.datetime]:
        """Yield the next due minutes."""
        for _ in range(count):
            after = self.next(after)
            yield after

    def _allows(self, day: datetime.date) -> bool:
        if day.month not in self._month:
            return False
        by_day, by_weekday = day.day in self._day, day.isoweekday() % 7 in self._weekday
        return by_day and by_weekday
