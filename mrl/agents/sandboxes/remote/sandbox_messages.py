"""Messages, addresses and the key of remote sandboxes, for client and server.

Each message is binary: one byte that says its kind, then JSON or raw bytes. Nothing is unpickled.

| kind | from | content |
|---|---|---|
| CALL | both | JSON: a call of the client, or the answer to it |
| DATA | both | the bytes of the files that the last CALL lists, in its order |
| OPENED, PASSED, ENDED, CLOSED | both | a connection to the model: its number, and the bytes that it passes |
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.files import read_private

PATH = "/v1/sandbox"
CALL, DATA, OPENED, PASSED, ENDED, CLOSED = b"C", b"D", b"O", b"P", b"E", b"X"
MOST_BYTES = 16 << 20
"""Largest message."""
KEY_VARIABLE = "MRL_SANDBOX_KEY"
_PART_BYTES = 1 << 20
_LEAST_KEY = 32


def quiet_logger() -> logging.Logger:
    """Return the logger of connections. Below ERROR it would log headers, so the key."""
    logger = logging.getLogger("mrl.sandboxes.connections")
    logger.setLevel(logging.ERROR)
    return logger


def json_message(content: Mapping[str, Any]) -> bytes:
    """Return a call, or the answer to one, as a message."""
    return CALL + json.dumps(content).encode()


def list_files(files: Mapping[str, WorkFile]) -> list[list[Any]]:
    """Return what a CALL says of files, whose bytes follow it."""
    return [[path, file.kind, file.is_executable, len(file.data)] for path, file in files.items()]


def total_bytes(listed: Sequence[Sequence[Any]]) -> int:
    """Return the number of bytes that follow a list of files."""
    return sum(size for *_, size in listed)


def data_messages(files: Mapping[str, WorkFile]) -> Iterator[bytes]:
    """Yield the bytes of files as messages."""
    data = b"".join(file.data for file in files.values())
    for start in range(0, len(data), _PART_BYTES):
        yield DATA + data[start : start + _PART_BYTES]


def read_files(listed: Sequence[Sequence[Any]], data: bytes) -> dict[str, WorkFile]:
    """Return files from their list and their bytes."""
    files, start = dict[str, WorkFile](), 0
    for path, kind, is_executable, size in listed:
        files[path] = WorkFile(data[start : start + size], bool(is_executable), kind)
        start += size
    return files


def is_loopback(host: str) -> bool:
    """Return True if an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(file: str | None) -> str:
    """Return the key of a file, or of the variable KEY_VARIABLE. Raise ConfigError if it is missing or short,
    or if others can read the file."""
    key, where = os.environ.get(KEY_VARIABLE, ""), f"the variable {KEY_VARIABLE}"
    if file is not None:
        where = f"the key file {file}"
        try:
            text = read_private(file)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
        if text is None:
            raise ConfigError(f"{where} must belong to this user and have mode 0600")
        key = text.strip()
    if len(key) < _LEAST_KEY or not key.isascii():
        raise ConfigError(
            f"{where} has no key of at least {_LEAST_KEY} ASCII characters; copy the server's key into a "
            f"file of mode 0600 (key_file), or set {KEY_VARIABLE}"
        )
    return key


def make_key(file: str) -> bool:
    """Draw a key and write it to a new file of this user's alone; return False if the file exists."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    with open(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32) + "\n")
    return True
