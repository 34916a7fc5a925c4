"""What one episode's environment may use."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds of its own (what it waited for a processor is not counted), bytes and memory."""

    reset_seconds: float = 60.0
    step_seconds: float = 30.0
    close_seconds: float = 5.0
    answer_kib: int = 256
    """Of one call's answer, as JSON."""
    memory_mib: int = 2048
    """Private memory of one episode's process, and of each that it starts."""

    def of(self, operation: str) -> float:
        """Seconds of an operation."""
        named = {"step": self.step_seconds, "close": self.close_seconds}
        return named.get(operation, self.reset_seconds)
