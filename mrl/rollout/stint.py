"""How long an engine works on one call, and how it is told that nobody waits any longer.

A call runs an engine for some beats of a few steps each. While the driver has no need of what it brings, a call lasts: each costs the
driver a message and its answer, whatever is in it. Whoever needs the engines then rings. A datagram is enough: one that is lost, or
that a firewall drops, leaves a call its whole time. It has a key, so that strangers cannot ring.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import struct
import time
from collections.abc import Collection, Iterable

Address = tuple[str, int, bytes]
"""Host, port and key of a bell."""
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


def ring(addresses: Iterable[Address], number: int) -> None:
    """End the calls up to this one, for the driver; what cannot be sent is as good as lost. The socket is
    closed at once: while it is open, anybody can send to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for host, port, key in addresses:
            with contextlib.suppress(OSError):
                sender.sendto(key + _NUMBER.pack(number), (host, port))


class Stints:
    """Of a run's engines, as their driver gives them. A rank is a process of an engine."""

    def __init__(self, usual_beats: int) -> None:
        """`usual_beats`: of a call that is not to last."""
        self._usual_beats = usual_beats
        self._bells: dict[int, Address] = {}
        """Of each rank that has answered."""
        self._seconds, self._awaited = 0.0, -1
        """Of the next calls."""
        self.longest = 0.0
        """The most seconds that calls had."""
        self._last_call, self._is_long = 0, False
        """Whether any call under way may last."""

    @property
    def ranks(self) -> Collection[int]:
        """Those that can be rung for."""
        return self._bells.keys()

    def heard(self, rank: int, bell: Address) -> None:
        self._bells[rank] = bell

    def forget(self, rank: int) -> None:
        """Another process is in its place, and has not answered yet."""
        self._bells.pop(rank, None)

    def be_patient(self, seconds: float, awaited: int) -> None:
        """How long a call may last from here on though it has something to bring, or until it has ended all that its engine had of
        prompts up to the index `awaited`; with 0 those under way are rung for."""
        self._seconds, self._awaited = seconds, awaited
        self.longest = max(self.longest, seconds)
        if not seconds:
            self.ring()

    def next(self, ranks: Iterable[int]) -> Stint:
        """Of the next call of an engine with these ranks. One that has not answered yet has no bell, and is not left alone."""
        self._last_call += 1
        if not self._seconds or any(rank not in self._bells for rank in ranks):
            return Stint(self._last_call, self._usual_beats)
        self._is_long = True
        return Stint(self._last_call, seconds=self._seconds, awaited=self._awaited)

    def ring(self, ranks: Iterable[int] | None = None) -> None:
        """Ends the calls under way, of these ranks or of all, after the beat that they are at."""
        if self._is_long:
            bells = self._bells.values() if ranks is None else [self._bells[rank] for rank in ranks]
            ring(bells, self._last_call)
        if ranks is None:
            self._is_long = False
