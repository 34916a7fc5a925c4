"""Outcomes of a candidate. A verifier's failure is an exception (RewardError), not an outcome."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """Outcome, which starts a verdict's reason and names its part."""

    ACCEPTED = "accepted"
    WRONG = "wrong"
    RUNTIME_ERROR = "runtime error"
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    OUTPUT_LIMIT = "output limit"
    FORBIDDEN = "forbidden call"


class CandidateEnded(Exception):
    """The candidate's run ended before its test."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"{outcome.value}: {reason}")
        self.outcome = outcome
        self.reason = reason
