"""Files that go into a sandbox and come out of it.

What comes out was written by the policy: links are never followed, and only regular files leave. Calls
that take an open folder run as the user whose files it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from mrl.errors import ConfigError

MAX_DEPTH = 64
"""Most folders above a file that leaves a sandbox; deeper ones stay."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkFile:
    """A file, folder or symbolic link, by its path relative to a folder of the sandbox."""

    data: bytes = b""
    """Content; of a link, its target."""
    is_executable: bool = False
    kind: Literal["file", "folder", "link"] = "file"


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return True if a relative path matches a pattern: `*` and `?` also match `/`."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def read_folder(folder: Path) -> dict[str, WorkFile]:
    """Return the files of a folder of this machine, or a single file. Raise ConfigError if it is missing."""
    try:
        if folder.is_file():
            return {folder.name: _read(folder)}
        files: dict[str, WorkFile] = {}
        for place, folders, names in os.walk(folder, onerror=_raise):
            for name in (*folders, *names):
                path = Path(place, name)
                if path.is_symlink() or path.is_dir() or path.is_file():
                    files[path.relative_to(folder).as_posix()] = _read(path)
        return files
    except OSError as error:
        raise ConfigError(f"the files {str(folder)!r} cannot be read: {error}") from error


def overlay(*layers: Mapping[str, WorkFile]) -> dict[str, WorkFile]:
    """Return the files of all layers, of which the first has priority: a later file that has the place of an
    earlier one, needs it as a folder, or replaces its folder is left out."""
    placed: dict[str, WorkFile] = {}
    folders: set[str] = set()
    for layer in layers:
        for path, file in layer.items():
            above = [str(folder) for folder in PurePosixPath(path).parents][:-1]
            if path in placed or path in folders or any(_is_no_folder(placed.get(one)) for one in above):
                continue
            placed[path] = file
            folders.update(above)
    return placed


def read_below(
    folder: int, patterns: Sequence[str], *, most_bytes: int, most_files: int
) -> dict[str, WorkFile] | None:
    """Return the matching regular files below an open folder that a sandbox wrote; None if they are too many
    or too large. No link is followed, and nothing is opened that could block."""
    files: dict[str, WorkFile] = {}
    for parent, name, path in _below(folder):
        if not matches(path, patterns):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            with open(descriptor, "rb") as stream:
                state = os.fstat(descriptor)
                if not stat.S_ISREG(state.st_mode):
                    continue
                if state.st_size > most_bytes or len(files) == most_files:
                    return None
                most_bytes -= state.st_size
                files[path] = WorkFile(stream.read(), bool(state.st_mode & 0o100))
    return files


def write_below(folder: int, files: Mapping[str, WorkFile]) -> None:
    """Write files below an open folder that a sandbox may have written to. No link is followed: whatever is
    in a file's or folder's place is replaced."""
    for path, file in files.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise ValueError(f"{path!r} is not a relative path of a file")
        with contextlib.ExitStack() as stack:
            parent = folder
            for name in parts[:-1]:
                parent = _folder(parent, name)
                stack.callback(os.close, parent)
            _write(parent, parts[-1], file)


def _write(parent: int, name: str, file: WorkFile) -> None:
    if file.kind == "folder":
        os.close(_folder(parent, name))
        return
    _remove(parent, name)
    if file.kind == "link":
        os.symlink(file.data, os.fsencode(name), dir_fd=parent)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as stream:
        stream.write(file.data)
        os.fchmod(stream.fileno(), 0o755 if file.is_executable else 0o644)


def _folder(parent: int, name: str) -> int:
    """Open a folder below another one; make it, in the place of whatever else is there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        pass
    except NotADirectoryError:  # also a link
        os.unlink(name, dir_fd=parent)
    os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    """Remove whatever has this name."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=parent)


def _below(folder: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """Yield (parent's descriptor, name, relative path) of each entry below a folder that is not a folder."""
    with os.scandir(folder) as entries:
        names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in names:
        if not is_folder:
            yield folder, name, prefix + name
        elif depth < MAX_DEPTH:
            try:
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError:  # the sandbox's user must not read it
                continue
            try:
                yield from _below(child, f"{prefix}{name}/", depth + 1)
            finally:
                os.close(child)


def _read(path: Path) -> WorkFile:
    if path.is_symlink():
        return WorkFile(os.fsencode(os.readlink(path)), kind="link")
    if path.is_dir():
        return WorkFile(kind="folder")
    return WorkFile(path.read_bytes(), os.access(path, os.X_OK))


def _is_no_folder(file: WorkFile | None) -> bool:
    return file is not None and file.kind != "folder"


def _raise(error: OSError) -> None:
    raise error
