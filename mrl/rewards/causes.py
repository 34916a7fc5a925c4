"""Why samples and episodes fail, logged once for each cause and not once for each of them."""

from __future__ import annotations

import collections
import logging
import re

_VARYING = re.compile(r"""'[^']*'|"[^"]*"|(?<!\.py:)(?<![\d.])\d+(?:\.\d+)?""")
_MOST = 64
"""Causes that are counted apart."""


def cause_of(reason: str) -> str:
    """Return what several failures of one cause share of a reason: all but numbers and quoted texts; a line's number stays."""
    return _VARYING.sub("", reason)


class CauseLog:
    """Writes a warning when a cause first comes, and again, with its count, at 10, 100, 1,000 of it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, what: str, reason: str) -> None:
        """Count a failure, and write a line if one is due. `what` failed, and why."""
        cause = cause_of(reason)
        if cause not in self._counts and len(self._counts) >= _MOST:
            cause = ""
        self._counts[cause] += 1
        count = self._counts[cause]
        if count == 1:
            self._log.warning("%s: %s", what, reason)
        elif str(count).strip("0") == "1":
            self._log.warning("%s (%d of this cause): %s", what, count, reason)
