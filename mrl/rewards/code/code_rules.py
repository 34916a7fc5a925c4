"""Settings and constants of program runs."""

from pydantic import Field

from mrl.section import Section

PROCESSES = 32
"""Largest number of a candidate's processes and threads together."""
OUTPUT_KIB = 256
"""Largest output of a run in KiB."""
FILE_MIB = 32
"""Size of the writable file system in MiB."""


class CodeRules(Section):
    """Limits of one program run."""

    seconds: float = Field(default=5.0, gt=0)
    """Limit one candidate process to so many seconds by the clock, without waits for a CPU."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Limit one candidate process and its children to so many seconds of CPU time."""
    memory_mib: int = Field(default=512, ge=32)
    """Limit the candidate's processes to so many MiB; without a cgroup this includes files and sockets."""
    partial: bool = False
    """Give the share of passed cases as the value instead of all or nothing."""
