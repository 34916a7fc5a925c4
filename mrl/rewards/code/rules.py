"""What of running programs is a setting."""

from pydantic import Field

from mrl.section import Section


class CodeRules(Section):
    """Limits of one program run."""

    seconds: float = Field(default=5.0, gt=0)
    """Time of one process of the candidate by the clock, without what it waited for a processor."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Processor time of one process of the candidate with its children."""
    memory_mib: int = Field(default=512, ge=32)
    """Memory of the candidate's processes; where no cgroup can be made, its files and what its sockets can hold are a
    part of it."""
    processes: int = Field(default=32, ge=1)
    """Processes and threads of the candidate together."""
    output_kib: int = Field(default=256, ge=1)
    """Output bytes read before the run counts as over its limit."""
    file_mib: int = Field(default=32, ge=1)
    """Size of the writable file system."""
    partial: bool = False
    """The value is the share of passed cases rather than all or nothing."""
    cases_per_process: int = Field(default=16, ge=1)
    """Cases of a function-call task that share one process."""
