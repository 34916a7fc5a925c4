"""What of running programs is a setting."""

from pydantic import Field

from mrl.section import Section

PROCESSES = 32
"""Processes and threads of a candidate together."""
OUTPUT_KIB = 256
"""Output bytes read before a run counts as over its limit."""
FILE_MIB = 32
"""Size of the writable file system."""


class CodeRules(Section):
    """Limits of one program run."""

    seconds: float = Field(default=5.0, gt=0)
    """Time of one process of the candidate by the clock, without what it waited for a processor."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Processor time of one process of the candidate with its children."""
    memory_mib: int = Field(default=512, ge=32)
    """Memory of the candidate's processes; where no cgroup can be made, its files and what its sockets can hold are a
    part of it."""
    partial: bool = False
    """The value is the share of passed cases rather than all or nothing."""
