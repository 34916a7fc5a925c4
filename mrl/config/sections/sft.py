"""The short supervised start that gives a new model something to improve."""

from pydantic import Field

from mrl.config.sections.training import OptimizerSection
from mrl.section import Section


class SftSection(Section):
    """Supervised training on demonstrations, with the same Megatron worker."""

    data: str
    """Rows with `prompt` and `response`, in a file of any kind that data.train may name."""
    output: str
    """Folder the trained model is exported to (Hugging Face format)."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    batch_rows: int = Field(default=256, ge=1)
    """Rows of one step."""
    optimizer: OptimizerSection = OptimizerSection(lr=1e-3)
    """Its optimizer."""
