"""How a candidate fared. That a verifier failed is an exception (RewardError), not an outcome."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """What a reason starts with, and a verdict's part is named after."""

    ACCEPTED = "accepted"
    WRONG = "wrong"
    RUNTIME_ERROR = "runtime error"
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    OUTPUT_LIMIT = "output limit"
    FORBIDDEN = "forbidden call"


class CandidateEnded(Exception):
    """The run of a candidate is over before its test was."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"{outcome.value}: {reason}")
        self.outcome = outcome
        self.reason = reason
