"""What an algorithm remembers from step to step: coefficients that move (KL, entropy).

Owns the rules by which coefficients move, and the state for checkpoints. Where a coefficient is applied is the recipe's
(reward) and the objective's (loss).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.config.sections.algorithm import AlgorithmSection, EntropySection, KlSection

ENTROPY_STEP = 0.005
"""Change of the entropy coefficient per step towards its target."""
MAX_ENTROPY_COEFFICIENT = 1.0
"""Upper bound of the moving entropy coefficient."""


@dataclasses.dataclass
class Controller:
    """A coefficient that follows a measurement; this one never moves."""

    coefficient: float
    """What to apply now."""

    def update(self, measured: float, *, num_samples: int) -> None:
        """Learn the mean over the tokens of one step of `num_samples` samples."""

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


@dataclasses.dataclass
class Adaptive(Controller):
    """beta <- beta (1 + clip(kl / target - 1, +-0.2) num_samples / horizon) (Ziegler et al., arXiv 1909.08593, 2.2)."""

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
class EntropyTarget:
    """An additive coefficient that acts only while the last measured entropy is at or below the target (TRL).

    Before the first measurement nothing acts. Below or at the target the coefficient grows by ENTROPY_STEP, above it shrinks,
    within [0, MAX_ENTROPY_COEFFICIENT].
    """

    raw: float
    target: float
    last: float = float("inf")

    @property
    def coefficient(self) -> float:
        return self.raw if self.last <= self.target else 0.0

    def update(self, measured: float, *, num_samples: int) -> None:
        step = ENTROPY_STEP if measured <= self.target else -ENTROPY_STEP
        self.raw = min(MAX_ENTROPY_COEFFICIENT, max(0.0, self.raw + step))
        self.last = measured

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        self.raw, self.last = float(state["raw"]), float(state["last"])


def kl_controller(section: KlSection) -> Controller:
    """Fixed, or held at section.target."""
    if section.target is None:
        return Controller(section.coefficient)
    return Adaptive(section.coefficient, section.target, section.horizon)


def entropy_controller(section: EntropySection) -> Controller | EntropyTarget:
    """Fixed, or held at section.target."""
    if section.target is None:
        return Controller(section.coefficient)
    return EntropyTarget(section.coefficient, section.target)


@dataclasses.dataclass
class AlgorithmState:
    """One per run, in the driver."""

    kl: Controller
    entropy: Controller | EntropyTarget
    kl_in_loss: bool

    @classmethod
    def of(cls, config: AlgorithmSection) -> AlgorithmState:
        """The state before the first step."""
        return cls(
            kl=kl_controller(config.kl),
            entropy=entropy_controller(config.entropy),
            kl_in_loss=config.kl.location == "loss",
        )

    def coefficients(self) -> dict[str, float]:
        """What the objective reads beside the denominators."""
        return {"kl_coefficient": self.kl.coefficient, "entropy_coefficient": self.entropy.coefficient}

    def after_update(self, metrics: Mapping[str, float], *, num_samples: int) -> None:
        """Learn a step's reduced objective metrics. KL in the reward is learnt by shape_and_estimate instead."""
        if "policy/entropy" in metrics:
            self.entropy.update(metrics["policy/entropy"], num_samples=num_samples)
        if self.kl_in_loss and "policy/kl_reference" in metrics:
            self.kl.update(metrics["policy/kl_reference"], num_samples=num_samples)

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {"kl": self.kl.state(), "entropy": self.entropy.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.kl.restore(state["kl"])
        self.entropy.restore(state["entropy"])
