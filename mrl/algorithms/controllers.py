"""Coefficients that move from step to step: KL and entropy. Small objects with a state for checkpoints.

Owns the rules. Where a coefficient is applied is the recipe's (reward) and the objective's (loss).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from mrl.config.sections.algorithm import EntropySection, KlSection


class Controller(Protocol):
    """A coefficient that follows a measurement."""

    @property
    def coefficient(self) -> float:
        """What to apply now."""
        ...

    def update(self, measured: float, *, num_samples: int) -> None:
        """Learn the mean over the tokens of one step of `num_samples` samples."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


@dataclasses.dataclass
class Fixed:
    """Never moves."""

    coefficient: float

    def update(self, measured: float, *, num_samples: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The coefficient is the configuration's."""


@dataclasses.dataclass
class Adaptive:
    """beta <- beta (1 + clip(kl / target - 1, +-0.2) num_samples / horizon) (Ziegler et al., arXiv 1909.08593, 2.2)."""

    coefficient: float
    target: float
    horizon: int

    def update(self, measured: float, *, num_samples: int) -> None:
        error = min(0.2, max(-0.2, measured / self.target - 1.0))
        self.coefficient *= 1.0 + error * num_samples / self.horizon

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        self.coefficient = float(state["coefficient"])


@dataclasses.dataclass
class Window:
    """Every `steps` updates their mean is looked at: above `high` beta grows by `factor`, below `low` it shrinks.

    After a change the window starts anew, so that one excursion moves beta once.
    """

    coefficient: float
    low: float
    high: float
    factor: float
    steps: int
    seen: list[float] = dataclasses.field(default_factory=list)

    def update(self, measured: float, *, num_samples: int) -> None:
        self.seen.append(measured)
        if len(self.seen) < self.steps:
            return
        mean = sum(self.seen) / len(self.seen)
        self.seen = []
        if mean > self.high:
            self.coefficient *= self.factor
        elif mean < self.low:
            self.coefficient /= self.factor

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "seen": list(self.seen)}

    def restore(self, state: dict[str, Any]) -> None:
        self.coefficient, self.seen = float(state["coefficient"]), [float(x) for x in state["seen"]]


@dataclasses.dataclass
class EntropyTarget:
    """An additive coefficient that acts only while the last measured entropy is at or below the target (TRL).

    Before the first measurement nothing acts. Below or at the target the coefficient grows by delta, above it shrinks,
    within [0, highest].
    """

    raw: float
    target: float
    delta: float
    highest: float
    last: float = float("inf")

    @property
    def coefficient(self) -> float:
        return self.raw if self.last <= self.target else 0.0

    def update(self, measured: float, *, num_samples: int) -> None:
        step = self.delta if measured <= self.target else -self.delta
        self.raw = min(self.highest, max(0.0, self.raw + step))
        self.last = measured

    def state(self) -> dict[str, Any]:
        return {"raw": self.raw, "last": None if self.last == float("inf") else self.last}

    def restore(self, state: dict[str, Any]) -> None:
        self.raw = float(state["raw"])
        self.last = float("inf") if state["last"] is None else float(state["last"])


def kl_controller(section: KlSection) -> Controller:
    """The controller that section.controller names."""
    rule = section.controller
    if rule.kind == "adaptive":
        return Adaptive(section.coefficient, rule.target, rule.horizon)
    if rule.kind == "window":
        return Window(section.coefficient, rule.low, rule.high, rule.factor, rule.window_steps)
    return Fixed(section.coefficient)


def entropy_controller(section: EntropySection) -> Controller:
    """Fixed, or held at section.target."""
    if section.target is None:
        return Fixed(section.coefficient)
    return EntropyTarget(section.coefficient, section.target, section.delta, section.max_coefficient)
