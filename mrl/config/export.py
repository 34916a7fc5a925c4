"""Hugging Face folders made of checkpoints."""

from pydantic import Field

from mrl.config.section import Section


class ExportSection(Section):
    """How `mrl export` writes a checkpoint as a Hugging Face folder."""

    max_shard_bytes: int = Field(default=5_000_000_000, ge=1)
    """Largest safetensors file of a folder, unless one tensor is larger; the memory of an export follows it."""
