"""Files: what is shipped with the package is found, and what is written survives a crash of the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""What the name of a folder that is not complete ends in."""

CONFIGS = Path(__file__).parent / "configs"
"""The folder of recipes, model facts and hardware facts, in a checkout and in an installed package alike."""


def shipped(path: Path) -> Path:
    """The path itself where it exists; else `configs/...` is the file of that name that the package ships, if
    it does."""
    own = CONFIGS.joinpath(*path.parts[1:])
    return own if path.parts[:1] == ("configs",) and not path.exists() and own.is_file() else path


def is_own_folder(path: Path) -> bool:
    """Return True for a folder of this process's user; False for another user's, for a link and where there is none."""
    with contextlib.suppress(FileNotFoundError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return False


def write_durably(path: Path, data: bytes) -> None:
    """Writes and fsyncs a file."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def partial_of(path: Path) -> Path:
    """Where a file or folder lies while it is not complete."""
    return path.with_name(path.name + PARTIAL)


def replace_durably(path: Path, data: bytes) -> None:
    """Puts a file in another's place: at no time is there neither."""
    with replacing(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """What is written to the stream takes the file's place at the end of the block; not where that raises."""
    temporary = partial_of(path)
    with open(temporary, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def start_folder(path: Path) -> Path:
    """Makes partial_of(path), empty."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_folder(path: Path) -> None:
    """Makes partial_of(path), complete by now, visible as `path`, durably."""
    partial = partial_of(path)
    sync(partial)
    os.rename(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Fsyncs a file that was written, or a directory's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
