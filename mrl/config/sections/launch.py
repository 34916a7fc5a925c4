"""Processes and machines."""

from pydantic import Field

from mrl.config.sections.base import Section


class LaunchSection(Section):
    """Processes and machines."""

    ray_address: str | None = None
    """Address of an existing Ray cluster; null starts one on this machine and stops it at the end."""
    slots_per_node: int | None = Field(default=None, ge=1)
    """Slots of a node: its GPUs, or the shares of a machine without GPUs; null means all of its GPUs, or the
    world size without."""
    start_deadline_seconds: float = Field(default=600.0, gt=0)
    """Longest time until all workers are up."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Size of Ray's object store where the command starts the cluster."""
