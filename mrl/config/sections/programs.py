"""Settings of programs that are commands in sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class SandboxSection(Section):
    """Sandbox of a command."""

    kind: str = "bubblewrap"
    """Choose bubblewrap (namespaces of this machine), docker, podman, remote (`mrl sandboxes`), an entry
    point of mrl.sandboxes, or package.module:Class."""
    image: str | None = None
    """Make the read-only root from a folder with a root's files (bubblewrap; null: this machine's /usr), or
    from the image of this name (docker, podman)."""
    mounts: dict[str, str] = {}
    """Make folders of this machine readable inside: path here to path inside, which is not below /work, /tmp,
    /dev or /proc."""
    disk_mib: int = Field(default=1024, ge=8)
    """Limit all writable files (/work, /tmp) together to so many MiB, kept in memory; in containers, each
    folder."""
    processes: int = Field(default=256, ge=4)
    """Limit the number of processes and threads together."""
    cpus: float = Field(default=1.0, gt=0)
    """Limit the use of CPUs, if a cgroup can."""
    boot_seconds: float = Field(default=60.0, gt=0)
    """Give up a sandbox that is not there after so many seconds."""
    boots: int = Field(default=8, ge=1)
    """Boot at most so many sandboxes at once on a node."""
    options: dict[str, Any] = {}
    """Pass these keyword arguments to the provider's class."""

    def faults(self) -> Iterator[str]:
        for inside in self.mounts.values():
            parts = PurePosixPath(inside).parts
            if parts[:1] != ("/",) or len(parts) == 1 or parts[1] in ("work", "tmp", "dev", "proc"):
                yield f"the sandbox cannot mount a folder at {inside!r}; choose a path such as /opt/agent"


class GradeSection(Section):
    """Command that grades what a program left, in a fresh sandbox without a model."""

    command: list[str] = Field(min_length=1)
    """Run this in /work. Any status but 0 is the reward 0."""
    reward: Literal["status", "number"] = "status"
    """With status 0: the reward is 1 (status), or the number that the command wrote to /tmp/reward, 0 without
    one (number)."""
    keep: list[str] = Field(min_length=1)
    """Take regular files of the program's /work whose path matches one of these patterns (* also matches /);
    all other files are as before the program."""
    files: str | None = None
    """Add this folder's files, which the program never sees, in the place of any others."""
    seconds: float = Field(default=300.0, gt=0)
    """End the command after so many seconds, with the reward 0."""


class ProgramSection(Section):
    """Command that calls the policy as its model, in a sandbox."""

    command: list[str] = Field(min_length=1)
    """Run this in /work; {column} stands for the text of one of `columns`."""
    files: str | None = None
    """Copy this folder's files into /work."""
    columns: list[str] = ["prompt"]
    """Show the program only these columns of the row; /tmp/task.json has them."""
    env: dict[str, str] = {}
    """Set these environment variables, besides those of the model."""
    seconds: float = Field(default=1200.0, gt=0)
    """End the command after so many seconds, with its waits for the policy; what it left is graded."""
    sandbox: SandboxSection = SandboxSection()
    """Run the program and its grade in sandboxes of this kind and these limits."""
    grade: GradeSection | None = None
    """Compute the reward by a command; null: `reward` judges the last conversation."""

    @property
    def least_seconds(self) -> float:
        """Longest duration of a run that no fault ends."""
        boots = self.sandbox.boot_seconds * (1 if self.grade is None else 2)
        return boots + self.seconds + (0.0 if self.grade is None else self.grade.seconds)
