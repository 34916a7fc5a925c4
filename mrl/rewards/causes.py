"""Log of why samples and episodes fail: one line per cause, not per failure."""

from __future__ import annotations

import collections
import logging
import re

_VARYING = re.compile(r"""'[^']*'|"[^"]*"|(?<!\.py:)(?<![\d.])\d+(?:\.\d+)?""")
_MOST = 64
"""Causes that are counted separately; further ones share a count."""


def cause_of(reason: str) -> str:
    """Return the part of a reason that failures of one cause share: no quotes or numbers but line numbers."""
    return _VARYING.sub("", reason)


class CauseLog:
    """Logger of a warning for a cause's first failure, and with the count for its 10th, 100th, 1,000th."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, subject: str, reason: str) -> None:
        """Count a failure (`subject` failed for `reason`) and log it if due."""
        cause = cause_of(reason)
        if cause not in self._counts and len(self._counts) >= _MOST:
            cause = ""
        self._counts[cause] += 1
        count = self._counts[cause]
        if count == 1:
            self._log.warning("%s: %s", subject, reason)
        elif str(count).strip("0") == "1":
            self._log.warning("%s (%d of this cause): %s", subject, count, reason)
