"""How long an engine works on one call, and how it is told that nobody waits any longer.

A call runs an engine for some beats of a few steps each. While the driver has no need of what it brings, a call lasts: each costs the
driver a message and its answer, whatever is in it. Whoever needs the engines then rings. A datagram is enough: one that is lost, or
that a firewall drops, leaves a call its whole time. It has a key, so that strangers cannot ring.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

Address = tuple[str, int, bytes]
"""Host, port and key of a bell."""
Beats = Sequence[tuple[int, int]]
"""(engine, beats that it made) of calls, in order."""
_NUMBER = struct.Struct("<q")


@dataclasses.dataclass(frozen=True, slots=True)
class Stint:
    """What a call may last."""

    number: int
    """Of the call, among all of the run's engines."""
    beats: int = 1
    """It makes these in any case, as far as there is work."""
    seconds: float = 0.0
    """And more for so long, until somebody rings, or"""
    awaited: int = -1
    """the last request ends that the engine had of prompts up to this index, for which somebody waits."""

    def numbers(self) -> tuple[int, int, float, int]:
        """What makes it again: a message of plain numbers costs its sender a third of one with an object."""
        return self.number, self.beats, self.seconds, self.awaited


class Bell:
    """Of a process that works on calls."""

    def __init__(self, host: str) -> None:
        """`host`: the address at which the driver finds this process."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.setblocking(False)
        self._key = secrets.token_bytes(16)
        self.address: Address = (*self._socket.getsockname(), self._key)
        self._rang = -1

    def wants_more(self, stint: Stint, *, made: int, since: float) -> bool:
        """Whether a call goes on that has `made` beats since then (monotonic)."""
        if made < stint.beats:
            return True
        return time.monotonic() - since < stint.seconds and self._last() < stint.number

    def _last(self) -> int:
        """The last call that somebody rang for; all before it are meant too."""
        while True:
            try:
                said = self._socket.recv(len(self._key) + _NUMBER.size + 1)
            except BlockingIOError:
                return self._rang
            key, number = said[: len(self._key)], said[len(self._key) :]
            if secrets.compare_digest(key, self._key) and len(number) == _NUMBER.size:
                self._rang = max(self._rang, *_NUMBER.unpack(number))


class Ringer:
    """The driver's side."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self, addresses: Iterable[Address], number: int) -> None:
        """Ends the calls up to this one; what cannot be sent is as good as lost."""
        for host, port, key in addresses:
            try:
                self._socket.sendto(key + _NUMBER.pack(number), (host, port))
            except OSError:
                continue
