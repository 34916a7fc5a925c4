"""Files: what is shipped with the package is found, and what is written survives a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
"""The folder of recipes, model facts and hardware facts, in a checkout and in an installed package alike."""


def shipped(path: Path) -> Path:
    """The path itself where it exists; else `configs/...` is the file of that name that the package ships, if it does."""
    own = CONFIGS.joinpath(*path.parts[1:])
    return own if path.parts[:1] == ("configs",) and not path.exists() and own.is_file() else path


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
