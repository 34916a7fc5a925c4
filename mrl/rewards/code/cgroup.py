"""Memory, process and CPU limits of one sandbox run by cgroup (v1 or v2), if this process may create one."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count()
_TCP_BYTES = 8 * 2**20
_PERIOD_MICROSECONDS = 100_000


class Cgroup:
    """Limits of one run; `close` kills its processes and removes it."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.procs = [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in folders]

    def memory_was_exceeded(self) -> bool:
        """Return True if the kernel killed a process of the run for its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    lines = (folder / name).read_text().splitlines()
                    counts = dict(line.split() for line in lines if len(line.split()) == 2)
                    if int(counts.get("oom_kill", 0)):
                        return True
        return False

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes ever in the group; 0 if they are not counted."""
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):
                return int((folder / "cpuacct.usage").read_text()) / 1e9
            with contextlib.suppress(OSError, ValueError, KeyError):
                lines = (folder / "cpu.stat").read_text().splitlines()
                return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
        return 0.0

    def close(self, *, deadline_seconds: float = 2.0) -> None:
        """Kill remaining processes and remove the folders; raise OSError if the deadline passes."""
        for descriptor in self.procs:
            os.close(descriptor)
        _remove(self.folders, deadline_seconds)


def make_cgroup(*, memory_bytes: int, processes: int, cpus: float = 1.0) -> Cgroup | None:
    """Return a run's limits, or None if this process may not create a cgroup."""
    name = f"mrl-{os.getpid()}-{next(_NUMBERS)}"
    created: list[Path] = []
    try:
        for parent, settings in _settings(memory_bytes, processes, cpus):
            folder = parent.resolve() / name
            if folder not in created:  # controllers may share a hierarchy
                folder.mkdir()
                created.append(folder)
            for file, value, needed in settings:
                try:
                    (folder / file).write_text(value)
                except OSError:
                    if needed:
                        raise
        return Cgroup(created)
    except OSError:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return None


def kill_owned_by(owner: int, *, deadline_seconds: float = 0.5) -> None:
    """Kill the processes in a dead owner's groups and remove these; `remove_empty_cgroups` gets the rest."""
    folders = [folder for parent, _ in _settings() for folder in parent.glob(f"mrl-{owner}-*")]
    if folders and not Path(f"/proc/{owner}").exists():
        with contextlib.suppress(OSError):
            _remove(folders, deadline_seconds)


def _remove(folders: list[Path], deadline_seconds: float) -> None:
    deadline = time.monotonic() + deadline_seconds
    for folder in folders:
        while True:
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                _kill_all(folder)
                time.sleep(0.002)  # the kernel empties the group shortly after its last process ends


def remove_empty_cgroups() -> None:
    """Remove the empty groups of our killed processes."""
    for parent, _ in _settings():
        for folder in parent.glob("mrl-*-*"):
            owner = folder.name.split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):  # not empty: leave it
                    folder.rmdir()


def _settings(
    memory_bytes: int = 0, processes: int = 0, cpus: float = 1.0
) -> list[tuple[Path, list[tuple[str, str, bool]]]]:
    groups, quota = _own_groups(), int(cpus * _PERIOD_MICROSECONDS)
    if (_ROOT / "cgroup.controllers").exists():
        parent = _ROOT / groups.get("", "").lstrip("/")
        files = [
            ("memory.max", str(memory_bytes), True),
            ("memory.swap.max", "0", False),
            ("pids.max", str(processes), True),
            ("cpu.max", f"{quota} {_PERIOD_MICROSECONDS}", False),
        ]
        return [(parent, files)]
    memory = _ROOT / "memory" / groups.get("memory", "").lstrip("/")
    return [
        (
            memory if memory.is_dir() else _ROOT / "memory",
            [
                ("memory.limit_in_bytes", str(memory_bytes), True),
                ("memory.memsw.limit_in_bytes", str(memory_bytes), False),
                ("memory.kmem.tcp.limit_in_bytes", str(_TCP_BYTES), False),  # counted separately in v1
            ],
        ),
        (_under("pids", groups), [("pids.max", str(processes), True)]),
        (_under("cpu", groups), [("cpu.cfs_quota_us", str(quota), False)]),
        (_under("cpuacct", groups), []),
    ]


def _under(controller: str, groups: dict[str, str]) -> Path:
    folder = _ROOT / controller / groups.get(controller, "").lstrip("/")
    return folder if folder.is_dir() else _ROOT / controller


def _own_groups() -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _kill_all(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
