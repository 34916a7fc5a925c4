"""Door of a sandbox: the one address that its programs can reach.

A listener that only the sandbox can connect to, and for each of its connections one to the model's server
on this machine. Keys are checked there. It forwards while a command runs (`command_wait.py`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import urllib.parse
from collections.abc import Callable

from mrl.agents.environment import Model

MAX_CONNECTIONS = 64
"""Connections at a time; further ones wait in the listener's queue."""
_MAX_UNSENT = 256 << 10
_READ_BYTES = 64 << 10


class Door:
    """Forwarding of a listener's connections to a model's server."""

    def __init__(self, listener: socket.socket, model: Model) -> None:
        """`listener`: owned by the door from now on. `model`: its URL may be unix:PATH."""
        listener.setblocking(False)
        self._listener, self._address = listener, urllib.parse.urlsplit(model.url)
        self._ends: set[_End] = set()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Forward on the events of this selector, whose data are functions to call."""
        selector.register(self._listener, selectors.EVENT_READ, lambda: self._accept(selector))

    def unregister(self, selector: selectors.BaseSelector) -> None:
        """Close all connections, and forward no more."""
        for end in list(self._ends):
            self._close(end, selector)
        with contextlib.suppress(KeyError):
            selector.unregister(self._listener)

    def close(self) -> None:
        """Close the listener."""
        self._listener.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            inside, _ = self._listener.accept()
        except OSError:
            return
        try:
            outside = self._connected()
        except OSError:
            inside.close()
            return
        ends = _End(inside, self._update(selector)), _End(outside, self._update(selector))
        ends[0].other, ends[1].other = ends[1], ends[0]
        self._ends.update(ends)
        for end in ends:
            end.update(end)
        if len(self._ends) >= 2 * MAX_CONNECTIONS:
            selector.unregister(self._listener)

    def _connected(self) -> socket.socket:
        """Return a connection to the model's server."""
        if self._address.scheme != "unix":
            return socket.create_connection((self._address.hostname, self._address.port))
        outside = socket.socket(socket.AF_UNIX)
        try:
            outside.connect(self._address.path)
        except OSError:
            outside.close()
            raise
        return outside

    def _update(self, selector: selectors.BaseSelector) -> Callable[[_End], None]:
        """Return a function that waits for what an end can do next, or closes its connection."""

        def update(end: _End) -> None:
            if end not in self._ends:
                return
            if end.is_over:
                self._close(end, selector)
                return
            for one in (end, end.other):
                events = one.events()
                if events != one.registered:
                    if one.registered:
                        selector.unregister(one.socket)
                    if events:
                        selector.register(one.socket, events, one.forward)
                    one.registered = events

        return update

    def _close(self, end: _End, selector: selectors.BaseSelector) -> None:
        if len(self._ends) >= 2 * MAX_CONNECTIONS:
            self.register(selector)
        for one in (end, end.other):
            self._ends.discard(one)
            if one.registered:
                selector.unregister(one.socket)
                one.registered = 0
            one.socket.close()


class _End:
    """One of the two sockets of a connection."""

    other: _End

    def __init__(self, end: socket.socket, update: Callable[[_End], None]) -> None:
        end.setblocking(False)
        self.socket, self.update = end, update
        self.unsent = bytearray()
        """Bytes of the other end that this one has not taken yet."""
        self.has_ended = False
        """No more will be read from it."""
        self.registered = 0
        self._is_shut = self._is_broken = False

    @property
    def is_over(self) -> bool:
        ends = (self, self.other)
        return any(end._is_broken for end in ends) or all(end.has_ended and not end.unsent for end in ends)

    def events(self) -> int:
        reads = not self.has_ended and len(self.other.unsent) < _MAX_UNSENT
        return (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if self.unsent else 0)

    def forward(self) -> None:
        """Read what is there, and write what it takes."""
        try:
            if self.events() & selectors.EVENT_READ:
                with contextlib.suppress(BlockingIOError):
                    data = self.socket.recv(_READ_BYTES)
                    self.other.unsent += data
                    self.has_ended = not data
            for end in (self, self.other):
                end.flush()
        except OSError:
            self._is_broken = True
        self.update(self)

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        if self.other.has_ended and not self.unsent and not self._is_shut:
            self._is_shut = True
            self.socket.shutdown(socket.SHUT_WR)
