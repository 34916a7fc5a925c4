"""The value model of PPO."""

from pydantic import Field

from mrl.config.sections.training import OptimizerSection
from mrl.section import Section


class CriticOptimizerSection(OptimizerSection):
    """The optimizer of the critic."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""


class CriticSection(Section):
    """A value head on the family's backbone, trained beside the policy in its layout (algorithm.estimator gae
    only)."""

    path: str | None = None
    """Folder in Hugging Face format that the backbone starts from; model.path when absent. The value head
    starts at 0."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """The critic's optimizer."""
    warmup_steps: int = Field(default=0, ge=0)
    """First loop steps that train the critic and leave the policy alone."""
