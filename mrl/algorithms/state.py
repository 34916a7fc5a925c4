"""What an algorithm remembers from step to step: coefficients and running reward statistics.

Owns their creation from the configuration, their use after each update, and their checkpoint state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.algorithms.controllers import Controller, entropy_controller, kl_controller
from mrl.algorithms.running import RunningMoments
from mrl.config.sections.algorithm import AlgorithmSection


@dataclasses.dataclass
class State:
    """One per run, in the driver."""

    kl: Controller
    entropy: Controller
    kl_in_loss: bool
    moments: dict[str, RunningMoments] = dataclasses.field(default_factory=dict)
    """Raw-reward moments by domain, for normalisation over "running"."""

    @classmethod
    def of(cls, config: AlgorithmSection) -> State:
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
        moments = {name: moments.state() for name, moments in self.moments.items()}
        return {"kl": self.kl.state(), "entropy": self.entropy.state(), "moments": moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.kl.restore(state["kl"])
        self.entropy.restore(state["entropy"])
        self.moments = {name: RunningMoments(**moments) for name, moments in state["moments"].items()}
