"""The weight of the entropy bonus from step to step. Where it is applied is the objective's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.config.sections.algorithm import EntropySection

STEP = 0.005
"""Change of the coefficient per step towards its target."""
LARGEST = 1.0
"""Upper bound of the moving coefficient."""


@dataclasses.dataclass
class EntropyCoefficient:
    """Fixed, or with a target an additive coefficient that acts only while the last measured entropy is at or below it (TRL).

    With a target nothing acts before the first measurement. Below or at the target the coefficient grows by STEP, above it
    shrinks, within [0, LARGEST].
    """

    raw: float
    target: float | None = None
    last: float = float("inf")

    @classmethod
    def of(cls, section: EntropySection) -> EntropyCoefficient:
        """Before the first step."""
        return cls(section.coefficient, section.target)

    @property
    def value(self) -> float:
        """What to apply now."""
        return self.raw if self.target is None or self.last <= self.target else 0.0

    def update(self, measured: float) -> None:
        """Learn the mean entropy over the tokens of one step."""
        if self.target is not None:
            step = STEP if measured <= self.target else -STEP
            self.raw = min(LARGEST, max(0.0, self.raw + step))
            self.last = measured

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {} if self.target is None else {"raw": self.raw, "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        if state:
            self.raw, self.last = float(state["raw"]), float(state["last"])
