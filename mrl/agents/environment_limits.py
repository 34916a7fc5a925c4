"""Limits of one episode's environment."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits of one environment: seconds, without its waits for a processor, answer size and memory."""

    reset_seconds: float = 60.0
    step_seconds: float = 30.0
    run_seconds: float = 1800.0
    close_seconds: float = 5.0
    answer_kib: int = 256
    """Size of one call's answer, as JSON."""
    memory_mib: int = 2048
    """Private memory of one episode's process, and of each process that it starts."""

    def of(self, operation: str) -> float:
        """Return the seconds that an operation may take."""
        named = {"step": self.step_seconds, "run": self.run_seconds, "close": self.close_seconds}
        return named.get(operation, self.reset_seconds)
