"""Files: what is shipped with the package is found, and what is written survives a crash of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mrl.errors import ConfigError

log = logging.getLogger(__name__)

PARTIAL = ".partial"
"""What the name of a folder that is not complete ends in."""

CONFIGS = Path(__file__).parent / "configs"
"""The folder of recipes, model facts and hardware facts, in a checkout and in an installed package alike."""

LONGEST_TEMPORARY = 107 - len(
    "/mrl-12345678/r/session_2026-11-29_07-48-16_315022_4194304/sockets/plasma_store"
)
"""Bytes of a folder's path below which the paths of sockets fit, of which Ray's are the longest: such a path
has at most 107."""


def folder_for_sockets() -> str:
    """Return the usual folder of temporary files, or /tmp if the paths of Ray's and vLLM's sockets would be
    too long below it."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_TEMPORARY:
        return usual
    if os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    raise ConfigError(
        f"TMPDIR = {usual} is too long for the paths of sockets, and /tmp cannot be written; set TMPDIR to a "
        f"folder of at most {LONGEST_TEMPORARY} bytes"
    )


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


def highest_number(folder: Path, pattern: str) -> int:
    """Return the highest number of the files and folders `pattern` in a folder, whose `*` it stands for; 0 if there are none."""
    before, _, behind = pattern.partition("*")
    names = (path.name.removeprefix(before).removesuffix(behind) for path in folder.glob(pattern))
    return max((int(name) for name in names if name.isdecimal()), default=0)


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


def replace_text(path: Path, text: str) -> None:
    """Puts a file in the place of what is there: of a link in place of the file behind it. A device is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace")
    else:
        replace_durably(path, text.encode(errors="replace"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """What is written to the stream takes the file's place at the end of the block; not where that raises."""
    temporary = partial_of(path)
    temporary.unlink(missing_ok=True)
    with open(
        temporary, "xb"
    ) as stream:  # "x": nothing is written through a link that somebody else put there
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def put_aside(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines of a file that are no rows of it to the file `path`.damaged, with a warning."""
    beside = path.with_name(f"{path.name}.damaged")
    with beside.open("ab") as file:
        file.writelines(line.removesuffix(b"\n") + b"\n" for line in lines)
    log.warning("%s: lines that are no rows are now in %s: %d", path, beside.name, len(lines))


@contextlib.contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Gives the file that the block writes at `path`, whoever writes it, the permissions that umask gives any new file."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(stat.S_IMODE(mode))


def take_lock(path: Path, refusal: str) -> int:
    """Lock a file until the process ends or the returned descriptor is closed.

    ConfigError, `refusal` with {owner} filled in, if another process has it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise ConfigError(refusal.format(owner=owner)) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"host {socket.gethostname()} pid {os.getpid()}\n".encode())
    return handle


@contextlib.contextmanager
def held(path: Path, setting: str) -> Iterator[None]:
    """Hold what a command writes, and goes on with, for this command alone; its lock lies beside it meanwhile.

    ConfigError, which names the `setting`, if another command holds it.
    """
    path = path.absolute()
    lock = path.with_name(path.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = take_lock(lock, f"{setting} {path} is in use by {{owner}}; wait for it, or choose another")
        if lock.exists() and lock.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # its holder has just removed it
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


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
