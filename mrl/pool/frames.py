"""Files of frames, written at their end alone: a frame is a number and its bytes, with the digest of both.

mark (4 bytes) | number (8) | length (8) | XXH3-64 of number, length and bytes (8) | bytes
"""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path

import xxhash

from mrl.errors import PoolError

_HEADER = struct.Struct("<4sQQQ")
_MARK = b"MRLg"


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Where a frame lies in its file."""

    number: int
    start: int
    """Of its bytes, after the header."""
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def append(descriptor: int, at: int, number: int, data: bytes) -> Frame:
    """Writes a frame that begins at byte `at`, the end of the file; OSError where there is no room, and then nothing of
    it is left."""
    header = _HEADER.pack(_MARK, number, len(data), _digest(number, data))
    frame = Frame(number, at + _HEADER.size, len(data))
    try:
        _write(descriptor, header, at)
        _write(descriptor, data, frame.start)
    except BaseException:
        os.ftruncate(descriptor, at)
        raise
    return frame


def read_bytes(descriptor: int, frame: Frame, path: Path) -> bytes:
    """A frame's bytes. PoolError where they are not those that were written."""
    whole = os.pread(descriptor, _HEADER.size + frame.num_bytes, frame.start - _HEADER.size)
    data = whole[_HEADER.size :]
    if whole[: _HEADER.size] != _HEADER.pack(
        _MARK, frame.number, frame.num_bytes, _digest(frame.number, data)
    ):
        raise PoolError(
            f"group {frame.number} in {path} is damaged: its bytes are not those that were written"
        )
    return data


def _digest(number: int, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=(number ^ len(data)) & (2**64 - 1))


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done
