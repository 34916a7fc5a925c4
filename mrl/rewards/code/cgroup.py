"""Memory, process and processor limits for one sandbox run by cgroup, where this process may make one (v1 or
v2)."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count()
_TCP_BYTES = 8 * 2**20


class Cgroup:
    """Limits for one run; empty and removed at the end of the `with` block, its processes killed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.procs = [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in folders]

    def memory_was_exceeded(self) -> bool:
        """True where the kernel ended a process of the run for its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    lines = (folder / name).read_text().splitlines()
                    counts = dict(line.split() for line in lines if len(line.split()) == 2)
                    if int(counts.get("oom_kill", 0)):
                        return True
        return False

    def cpu_seconds(self) -> float:
        """Processor time of all processes that were ever in the group; 0 where it is not counted."""
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):
                return int((folder / "cpuacct.usage").read_text()) / 1e9
            with contextlib.suppress(OSError, ValueError, KeyError):
                lines = (folder / "cpu.stat").read_text().splitlines()
                return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
        return 0.0

    def close(self, *, deadline_seconds: float = 2.0) -> None:
        """Kill what is left and remove the folders. Raises OSError for one that does not go away in time."""
        for descriptor in self.procs:
            os.close(descriptor)
        _remove(self.folders, deadline_seconds)


def make_cgroup(*, memory_bytes: int, processes: int) -> Cgroup | None:
    """Limits of a run, or None where this process may not make a cgroup."""
    name = f"mrl-{os.getpid()}-{next(_NUMBERS)}"
    made: list[Path] = []
    try:
        for parent, settings in _settings(memory_bytes, processes):
            folder = parent.resolve() / name
            if folder not in made:  # controllers may share a hierarchy
                folder.mkdir()
                made.append(folder)
            for file, value, needed in settings:
                try:
                    (folder / file).write_text(value)
                except OSError:
                    if needed:
                        raise
        return Cgroup(made)
    except OSError:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return None


def remove_of(owner: int, *, deadline_seconds: float = 0.5) -> None:
    """Kills what is left in the groups of a process that was killed, and removes them; those that do not go away in time are swept later."""
    found = [folder for parent, _ in _settings(0, 0) for folder in parent.glob(f"mrl-{owner}-*")]
    if found and not Path(f"/proc/{owner}").exists():
        with contextlib.suppress(OSError):
            _remove(found, deadline_seconds)


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
                time.sleep(0.002)  # the kernel empties the group a moment after its last process is gone


def remove_empty_cgroups() -> None:
    """Remove the empty groups of processes of ours that were killed before they could."""
    for parent, _ in _settings(0, 0):
        for folder in parent.glob("mrl-*-*"):
            owner = folder.name.split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):  # not empty: not ours to end
                    folder.rmdir()


def _settings(memory_bytes: int, processes: int) -> list[tuple[Path, list[tuple[str, str, bool]]]]:
    own = _own_groups()
    if (_ROOT / "cgroup.controllers").exists():
        parent = _ROOT / own.get("", "").lstrip("/")
        files = [
            ("memory.max", str(memory_bytes), True),
            ("memory.swap.max", "0", False),
            ("pids.max", str(processes), True),
            ("cpu.max", "100000 100000", False),
        ]
        return [(parent, files)]
    memory = _ROOT / "memory" / own.get("memory", "").lstrip("/")
    return [
        (
            memory if memory.is_dir() else _ROOT / "memory",
            [
                ("memory.limit_in_bytes", str(memory_bytes), True),
                ("memory.memsw.limit_in_bytes", str(memory_bytes), False),
                ("memory.kmem.tcp.limit_in_bytes", str(_TCP_BYTES), False),  # counted apart here
            ],
        ),
        (_under("pids", own), [("pids.max", str(processes), True)]),
        (_under("cpu", own), [("cpu.cfs_quota_us", "100000", False)]),
        (_under("cpuacct", own), []),
    ]


def _under(controller: str, own: dict[str, str]) -> Path:
    folder = _ROOT / controller / own.get(controller, "").lstrip("/")
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
