"""Weight of the entropy bonus from step to step; the objective applies it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.config.sections.algorithm import EntropySection

STEP = 0.005
"""Change of the coefficient per step."""
LARGEST = 1.0
"""Upper bound of the adaptive coefficient."""


@dataclasses.dataclass
class EntropyCoefficient:
    """Fixed; or, with a target, additive and active only if the last entropy is at or below it (TRL).

    With a target it is 0 before the first measurement. It grows by STEP at or below the target, else shrinks,
    within [0, LARGEST].
    """

    raw: float
    target: float | None = None
    last: float = float("inf")

    @classmethod
    def of(cls, section: EntropySection) -> EntropyCoefficient:
        """Build the coefficient before the first step."""
        return cls(section.coefficient, section.target)

    @property
    def value(self) -> float:
        """Coefficient to apply now."""
        return self.raw if self.target is None or self.last <= self.target else 0.0

    def update(self, measured: float) -> None:
        """Adapt to the mean entropy over the tokens of one step."""
        if self.target is not None:
            step = STEP if measured <= self.target else -STEP
            self.raw = min(LARGEST, max(0.0, self.raw + step))
            self.last = measured

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {} if self.target is None else {"raw": self.raw, "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state:
            self.raw, self.last = float(state["raw"]), float(state["last"])
