"""Settings of PPO's critic."""

from pydantic import Field

from mrl.config.sections.training import OptimizerSection
from mrl.section import Section


class CriticOptimizerSection(OptimizerSection):
    """Optimizer of the critic."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""


class CriticSection(Section):
    """Value head on the family's backbone, trained in the policy's layout (algorithm.estimator gae only)."""

    path: str | None = None
    """Start the backbone from this Hugging Face folder or hub name; null takes model.path. The value head
    starts at 0."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """Configure the critic's optimizer."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train only the critic in this many first loop steps."""
