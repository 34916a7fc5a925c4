"""Hugging Face folders made of checkpoints."""

from pydantic import Field

from mrl.section import Section

MAX_SHARD_BYTES = 5_000_000_000
"""Largest safetensors file of a folder, unless one tensor is larger; the memory of an export follows it."""


class ExportSection(Section):
    """Checkpoints as Hugging Face folders, by `mrl export` or while the run goes on."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between folders that the run makes of its checkpoints, in a process beside it, the last step's
    included; 0 makes none."""
    folder: str | None = None
    """Parent of the folders NAME/step-N of a run; absent means `exports/step-N` in the run's folder."""
    keep: int | None = Field(default=None, ge=1)
    """Newest folders that are kept; all when absent."""
    deadline_seconds: float = Field(default=3600.0, gt=0)
    """Longest time one folder may take before its process is ended; training goes on in any case."""
