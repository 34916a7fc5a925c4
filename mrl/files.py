"""Files and folders that survive a crash of the machine once they are there."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync a file."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def commit_folder(partial: Path, path: Path) -> None:
    """Make a complete folder visible under its name, durably."""
    sync(partial)
    os.rename(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file that was written, or a directory's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
