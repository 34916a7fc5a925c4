"""Private small file systems: a run folder that can be full, and a /dev/shm that nobody else uses."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler"


def own_mounts() -> None:
    """Give this process (of one thread) and its children private mounts; a user who is not root becomes root
    of a user namespace. Raise OSError if the kernel forbids it."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        os.unshare(os.CLONE_NEWNS)
    else:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _run("mount", "--make-rprivate", "/")


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount an empty folder in memory; its contents are gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "soak", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def fill(folder: Path) -> None:
    """Fill the folder's disk."""
    with contextlib.suppress(OSError), (folder / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_room(folder: Path) -> None:
    """Free the space that `fill` took."""
    (folder / FILLER).unlink(missing_ok=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
