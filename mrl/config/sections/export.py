"""Settings of the export of checkpoints as Hugging Face folders."""

from pydantic import Field

from mrl.section import Section

MAX_SHARD_BYTES = 5_000_000_000
"""Largest safetensors file of a folder, unless one tensor is larger; bounds the memory of an export."""


class ExportSection(Section):
    """Export of checkpoints as Hugging Face folders, by `mrl export` or during the run."""

    every_steps: int = Field(default=0, ge=0)
    """Export a checkpoint every this many steps, and the last one, in a separate process; 0 exports none."""
    folder: str | None = None
    """Write folders NAME/step-N here; null writes `exports/step-N` in the run's folder."""
    keep: int | None = Field(default=None, ge=1)
    """Keep this many newest folders; null keeps all."""
    deadline_seconds: float = Field(default=3600.0, gt=0)
    """End the export of one folder after this many seconds; training continues in any case."""
