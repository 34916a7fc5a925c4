"""Sandboxes: where programs run that the policy steers, and where their results are graded.

    with open_sandbox(model=model) as sandbox:          # in a program's `run`
        sandbox.write({"agent.py": WorkFile(code)})
        done = sandbox.run(["python3", "agent.py"], seconds=600, env=model_variables(sandbox))
        files = sandbox.read(["*.patch"])

| provider | boundary |
|---|---|
| `bubblewrap` | namespaces of this machine (bubblewrap.py) |
| `docker`, `podman` | containers (containers.py) |
| `remote` | sandboxes of another machine, where `mrl sandboxes` runs (remote/) |
| any other word | the entry point of that name in the group `mrl.sandboxes` of an installed package |
| `package.module:Class`, `file.py:Class` | imported, as environments are |

The last two are classes of others, for other machines or services: `SandboxProvider` is their interface.

A failure of the sandbox itself raises SandboxLost: an infrastructure failure, never a reward. What a command
does in it (exit statuses, crashes, exceeded limits) is the command's result, and raises nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from mrl.agents.environment import Model
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.user_code import find_callable

GROUP = "mrl.sandboxes"
WORK, TMP = "/work", "/tmp"
"""Writable folders of every sandbox. Commands start in WORK; TMP is their home."""
KEPT_MIB, KEPT_FILES = 64, 10_000
"""Most that `read` returns."""
OUTPUT_BYTES = 64 << 10
"""Most of a command's output that is kept: its end."""
_SHIPPED = {
    "bubblewrap": "mrl.agents.sandboxes.bubblewrap:Bubblewrap",
    "docker": "mrl.agents.sandboxes.containers:Docker",
    "podman": "mrl.agents.sandboxes.containers:Podman",
    "remote": "mrl.agents.sandboxes.remote.sandbox_client:RemoteSandboxes",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SandboxLimits:
    """SandboxLimits of one sandbox."""

    memory_mib: int = 2048
    """Memory of all its processes; of each process if nothing here counts their sum (`Sandbox.describe`)."""
    disk_mib: int = 1024
    """Size of all its writable files together."""
    processes: int = 256
    """Number of its processes and threads together."""
    cpus: float = 1.0
    boot_seconds: float = 60.0
    """Time until the sandbox is there."""
    life_seconds: float = 86400.0
    """Longest life. A provider on another machine ends it then, because nobody else does if its owner was
    killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended."""

    status: int
    """Exit status; 128 + N if signal N ended it."""
    seconds: float
    output: str
    """End of its standard output and standard error together."""
    timed_out: bool = False
    out_of_memory: bool = False
    """The kernel killed one of its processes for the sandbox's memory, as far as that can be known."""

    def __str__(self) -> str:
        reason = f"status {self.status}"
        if self.timed_out:
            reason = f"ended after its {self.seconds:.0f} s"
        elif self.out_of_memory:
            reason += ", out of memory"
        return f"{reason}: {self.output.strip()[-300:]!a}"


class TooLarge(Exception):
    """Files that are more or larger than a limit: of what `Sandbox.read` returns, or of the disk."""


class Sandbox(Protocol):
    """An open sandbox. Nothing of it remains after `close`, or after the process that opened it.

    A class that inherits from this one is closed at the end of a `with` block."""

    @property
    def model(self) -> Model | None:
        """The model that it was opened for, under the address that it has inside. Nothing else outside can be
        reached."""
        ...

    def run(self, command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Exit:
        """Run a command in WORK to its end, and end all processes that it leaves.

        Args:
            seconds: The command is killed after so many seconds by the clock.
            env: Environment variables; PATH, HOME and LANG have values without it.
        """
        ...

    def write(self, files: Mapping[str, WorkFile], folder: str = WORK) -> None:
        """Write files by their paths below a writable folder; replace what is there. Raises TooLarge."""
        ...

    def read(self, patterns: Sequence[str], folder: str = WORK) -> dict[str, WorkFile]:
        """Return the regular files below a writable folder whose path matches a pattern
        (`work_files.matches`). Raises TooLarge."""
        ...

    def describe(self) -> str:
        """Return one line for the log: the boundary, and the limits that apply."""
        ...

    def close(self) -> None:
        """End all its processes and remove its files."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SandboxProvider(Protocol):
    """Kind of sandboxes. `sandbox.kind` names a class whose keyword arguments are `sandbox.options`.

    Its methods, and those of its sandboxes, are called in the process of one program, which may be killed at
    any time: then the sandbox must end without `close`, at the latest after `limits.life_seconds`."""

    def open(
        self,
        *,
        image: str | None,
        mounts: Mapping[str, str],
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str] = (),
    ) -> Sandbox:
        """Open a sandbox.

        Args:
            image: What the sandbox's root is made of; None for the provider's default.
            mounts: Folders of this machine, and the paths by which they can be read inside.
            model: Its address is the only one that can be reached from inside; in `mrl sandboxes`, unix:PATH.
                None: there is none.
            folders: Further writable folders, absolute paths; empty, whatever the image has there. Only tasks
                of Harbor need this argument.

        Raises:
            SandboxLost: It did not boot within `limits.boot_seconds`.
            ConfigError: The image or a mount cannot exist.
        """
        ...


def model_variables(sandbox: Sandbox) -> dict[str, str]:
    """Return the environment variables by which clients in a sandbox find its model."""
    return sandbox.model.variables() if sandbox.model is not None else {}


def find_provider(kind: str, options: Mapping[str, Any] | None = None) -> SandboxProvider:
    """Return a kind's provider. Raise ConfigError if the kind is not known, or refuses the options."""
    path = kind if ":" in kind else _path(kind)
    _, provider = find_callable(path, setting="sandbox.kind", kind="class")
    try:
        return provider(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"sandbox.options of {kind}: {error}") from error


def _path(kind: str) -> str:
    if kind in _SHIPPED:
        return _SHIPPED[kind]
    points = importlib.metadata.entry_points(group=GROUP)
    if kind not in points.names:
        known = ", ".join(sorted({*_SHIPPED, *points.names}))
        raise ConfigError(
            f"sandbox.kind = {kind!r} is not known; choose one of {known}, or a path (package.module:Class, "
            "file.py:Class)"
        )
    return points[kind].value


def open_sandbox(
    kind: str | SandboxProvider = "bubblewrap",
    *,
    image: str | None = None,
    mounts: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    model: Model | None = None,
    options: Mapping[str, Any] | None = None,
    folders: Sequence[str] = (),
) -> Sandbox:
    """Open a sandbox of a kind, or of a provider, as `SandboxProvider.open`."""
    provider = find_provider(kind, options) if isinstance(kind, str) else kind
    further = {"folders": folders} if folders else {}  # a provider may be without them
    return provider.open(
        image=image, mounts=mounts or {}, limits=limits or SandboxLimits(), model=model, **further
    )
