"""Find files shipped with the package, and write files that survive a crash of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from mrl.errors import ConfigError

log = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Suffix of an incomplete file or folder."""

CONFIGS = Path(__file__).parent / "configs"
"""Folder of recipes, model facts and hardware facts, in a checkout and in an installed package."""

LOCK_SECONDS = 1.0
"""Seconds to wait for a lock before refusing."""

LONGEST_TEMPORARY = 107 - len(
    "/mrl-12345678/r/session_2026-11-29_07-48-16_315022_4194304/sockets/plasma_store"
)
"""Longest folder path (bytes) below which socket paths fit, Ray's being the longest: at most 107 bytes."""


def folder_for_sockets() -> str:
    """Return the usual temporary folder, or /tmp if Ray's and vLLM's socket paths would be too long in it."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_TEMPORARY:
        return usual
    if os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    raise ConfigError(
        f"TMPDIR = {usual} is too long for socket paths, and /tmp is not writable; set TMPDIR to a folder "
        f"of at most {LONGEST_TEMPORARY} bytes"
    )


def shipped(path: Path) -> Path:
    """Return the path if it exists; else the package's file of that name, for `configs/...`."""
    package_file = CONFIGS.joinpath(*path.parts[1:])
    return (
        package_file
        if path.parts[:1] == ("configs",) and not path.exists() and package_file.is_file()
        else path
    )


def is_own_folder(path: Path) -> bool:
    """Return True for a folder of this process's user; False for another user's, a link, or none."""
    with contextlib.suppress(FileNotFoundError):
        facts = path.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return False


def read_private(path: str | Path) -> str | None:
    """Return a file's text; None if it is not this user's, or others can read or write it. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        facts = os.fstat(file.fileno())
        is_private = facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
        return file.read() if is_private else None


def highest_number(folder: Path, pattern: str) -> int:
    """Return the highest number that `*` matches in the names `pattern` of a folder; 0 if none matches."""
    before, _, after = pattern.partition("*")
    names = (path.name.removeprefix(before).removesuffix(after) for path in folder.glob(pattern))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync a file."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def partial_of(path: Path) -> Path:
    """Return the path of a file or folder while it is incomplete."""
    return path.with_name(path.name + PARTIAL)


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably."""
    with replacing(path) as stream:
        stream.write(data)


def replace_text(path: Path, text: str) -> None:
    """Replace a file, or the target of a link; write to a device."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace")
    else:
        replace_durably(path, text.encode(errors="replace"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream that replaces the file at the end of the block, unless the block raises."""
    temporary = partial_of(path)
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as stream:  # "x" refuses a link that somebody else put there
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def put_aside(path: Path, lines: Sequence[bytes]) -> None:
    """Append damaged lines of a file to `path`.damaged, with a warning."""
    damaged = path.with_name(f"{path.name}.damaged")
    with damaged.open("ab") as file:
        file.writelines(line.removesuffix(b"\n") + b"\n" for line in lines)
    log.warning("%s: moved damaged lines to %s: %d", path, damaged.name, len(lines))


@contextlib.contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give the file that the block writes at `path` the permissions that umask gives any new file."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(stat.S_IMODE(mode))


def share_weights(folder: Path) -> None:
    """Give the safetensors files of a model folder the permissions of its config.json.

    safetensors writes files that only their owner can read."""
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path, refusal: str) -> int:
    """Lock a file until the process ends or `release_lock` gets the returned descriptor.

    Raise ConfigError with `refusal`, {owner} filled in, if another process has the lock for LOCK_SECONDS. A
    killed owner's child has it too, between its fork and its exec.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while not (locked := _try_lock(handle)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not locked:
        owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise ConfigError(refusal.format(owner=owner))
    os.ftruncate(handle, 0)
    os.write(handle, f"host {socket.gethostname()} pid {os.getpid()}\n".encode())
    return handle


def release_lock(handle: int) -> None:
    """Unlock a file of `take_lock`; it names no owner any more."""
    os.ftruncate(handle, 0)
    os.close(handle)


def has_living_owner(lock: Path) -> bool:
    """Return True if the owner that a file of `take_lock` names is alive on this machine; take no lock."""
    try:
        with lock.open(encoding="utf-8") as file:
            _, host, _, pid = file.read(200).split()
            locked = os.fstat(file.fileno()).st_mtime
        return host == socket.gethostname() and psutil.Process(int(pid)).create_time() < locked + 1
    except (OSError, ValueError, psutil.Error):
        return False


@contextlib.contextmanager
def output_lock(path: Path, setting: str) -> Iterator[None]:
    """Reserve the output of a command for this command by a lock file beside it.

    Raise ConfigError, which names the `setting`, if another command has the lock.
    """
    path = path.absolute()
    lock = path.with_name(path.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = take_lock(lock, f"{setting} {path} is in use by {{owner}}; wait for it, or choose another")
        if lock.exists() and lock.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # its owner has just removed it
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        release_lock(handle)


def start_folder(path: Path) -> Path:
    """Create partial_of(path), empty."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_folder(path: Path) -> None:
    """Rename the complete partial_of(path) to `path`, durably."""
    partial = partial_of(path)
    sync(partial)
    os.rename(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Fsync a written file, or a directory's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
