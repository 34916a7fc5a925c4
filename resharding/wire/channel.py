"""Control messages between a sender and its receiver, over ZMQ; no wait outlasts its deadline or the peer.

On one slot: an abstract Unix socket, which leaves no file, accepts only processes of the same user, and
watches the peer's process. Between machines: TCP under CURVE, which watches the connection. The address
contains the server key, so that only processes that were given the address can connect.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import weakref
from collections.abc import Callable

import zmq

from mrl.errors import WeightSyncError
from mrl.resharding.wire.messages import AnyMessage, Message, StillWaiting, decode_message, encode_message
from mrl.resharding.wire.processes import ProcessId

_POLL_MILLISECONDS = 100
_PROBE_SECONDS = 0.5
"""How often a network listener checks that the sender it waits for is still connected."""
_PREFIX = "ipc://@mrl-"
_NETWORK = "tcp://"
_LINGER_MILLISECONDS = 500
"""How long a closing socket tries to deliver its last message (an Abort, a Failed)."""
_LARGEST_MESSAGE = 256 << 20

Lost = Callable[[], str | None]
"""Returns why the peer can never answer, or None."""


def _slot_address() -> str:
    """Return a fresh abstract address that names the listening process."""
    listener = ProcessId.own()
    return f"{_PREFIX}{listener.pid}-{listener.start_ticks}-{uuid.uuid4().hex}"


def _listener_of(address: str) -> ProcessId:
    """Return the process that listens at an address from `_slot_address`."""
    parts = address.removeprefix(_PREFIX).split("-")
    if not address.startswith(_PREFIX) or len(parts) != 3 or not all(p.isdecimal() for p in parts[:2]):
        raise WeightSyncError(
            f"{address!r} is not a receiver's address; pass the one that the engine's prepare_sync returned"
        )
    return ProcessId(int(parts[0]), int(parts[1]))


class Listener:
    """The receiver's end: bound once, talks to one sender at a time, identifies each by its ZMQ identity."""

    def __init__(self, host: str | None = None) -> None:
        """`host`: this machine's address for senders on other machines; None for a sender on this slot."""
        context, self._socket = _new_socket(zmq.ROUTER)
        self.close = _closer(self, context, [self._socket])
        self._networked = host is not None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if host is None:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            self.address = _slot_address()
            self._socket.bind(self.address)
        else:
            public, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_server = True
            port = self._socket.bind_to_random_port(f"{_NETWORK}{host}")
            self.address = f"{_NETWORK}{host}:{port}/{public.hex()}"
        self._probed = 0.0
        self._kept: tuple[bytes, AnyMessage | WeightSyncError] | None = None

    def send(self, sender: bytes, message: Message) -> None:
        """Queue a message; drop it if the sender is gone."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([sender, encode_message(message)])

    def receive(
        self, deadline: float, waiting_for: str, lost: Lost | None = None
    ) -> tuple[bytes, AnyMessage | WeightSyncError]:
        """Return (sender, message); a malformed message comes as the error, for the caller to answer."""
        if self._kept is None:
            _wait(self._socket, deadline, waiting_for, lost)
        message, self._kept = self._kept or self._read(), None
        return message

    def peek(self) -> tuple[bytes, AnyMessage | WeightSyncError] | None:
        """Return the waiting message or None, without taking it: `receive` will return it too."""
        if self._kept is None and self._socket.poll(0):
            self._kept = self._read()
        return self._kept

    def _read(self) -> tuple[bytes, AnyMessage | WeightSyncError]:
        sender, *frames = self._socket.recv_multipart()
        try:
            return sender, decode_message(b"".join(frames))
        except WeightSyncError as error:
            return sender, error

    def watch(self, sender: bytes, process: ProcessId) -> Lost:
        """Return a function that returns why this sender is gone, or None."""

        def lost() -> str | None:
            if not self._networked:
                return None if process.alive() else f"process {process.pid} ended"
            if time.monotonic() - self._probed < _PROBE_SECONDS:
                return None
            self._probed = time.monotonic()
            try:
                self._socket.send_multipart([sender, encode_message(StillWaiting(session_id=""))])
            except zmq.ZMQError:
                return f"the connection of process {process.pid} closed"
            return None

        return lost


class Dialer:
    """The sender's end."""

    def __init__(self, address: str) -> None:
        networked = address.startswith(_NETWORK)
        self._peer = None if networked else _listener_of(address)
        context, self._socket = _new_socket(zmq.DEALER)
        sockets = [self._socket]
        self.close = _closer(self, context, sockets)
        self.endpoint, _, key = address.rpartition("/") if networked else (address, "", "")
        """Address of the receiver, without its key."""
        if networked:
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = bytes.fromhex(key)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            sockets.append(self._monitor)
        self._socket.connect(self.endpoint)
        self._kept: AnyMessage | None = None

    def send(self, message: Message) -> None:
        self._socket.send(encode_message(message))

    def receive(self, deadline: float, waiting_for: str) -> AnyMessage:
        while self.peek() is None:
            _wait(self._socket, deadline, waiting_for, self.lost)
        message, self._kept = self._kept, None
        assert message is not None
        return message

    def peek(self) -> AnyMessage | None:
        """Return the waiting message or None, without taking it: `receive` will return it too."""
        while self._kept is None and self._socket.poll(0):
            message = decode_message(self._socket.recv())
            self._kept = None if isinstance(message, StillWaiting) else message
        return self._kept

    def lost(self) -> str | None:
        """Return why the receiver can never answer, or None."""
        if self._peer is not None:
            return None if self._peer.alive() else f"process {self._peer.pid} ended"
        return f"the connection to {self.endpoint} closed" if self._monitor.poll(0) else None


def _new_socket(kind: int) -> tuple[zmq.Context, zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
    return context, socket


def _closer(owner: object, context: zmq.Context, sockets: list[zmq.Socket]) -> weakref.finalize:
    """Return an end's `close`; it also runs when the end is collected.

    A context collected before its sockets, or with a message for a dead peer, would wait for ever."""

    def close() -> None:
        for socket in sockets:
            socket.close()
        context.term()

    closer = weakref.finalize(owner, close)
    closer.atexit = False
    return closer


def _wait(socket: zmq.Socket, deadline: float, waiting_for: str, lost: Lost | None) -> None:
    """Wait for a message; raise WeightSyncError at the deadline (monotonic) or when the peer is gone."""
    started = time.monotonic()
    while not socket.poll(_POLL_MILLISECONDS):
        reason = lost() if lost is not None else None
        if reason is not None:
            if socket.poll(0):  # its last message may have arrived after the poll above
                return
            raise WeightSyncError(f"{reason} while this process waited for {waiting_for}")
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"no {waiting_for} within {time.monotonic() - started:.1f} s; raise sync.deadline_seconds if "
                "the peer was only slow"
            )
