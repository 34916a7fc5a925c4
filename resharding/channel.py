"""Message transport between a slot's sender and receiver: ZMQ over an abstract Unix socket, which leaves no file.

Only processes of the same user are accepted. Every wait has a deadline and ends early when the peer process is gone.
"""

from __future__ import annotations

import os
import time
import uuid

import zmq

from mrl.errors import ReshardError
from resharding.messages import AnyMessage, Message, decode, encode
from resharding.processes import ProcessId

_POLL_MILLISECONDS = 100
_PREFIX = "ipc://@mrl-"
_LINGER_MILLISECONDS = 500
"""How long a closing socket still tries to deliver its last message (an Abort, a Failed)."""
_LARGEST_MESSAGE = 256 << 20


def own_address() -> str:
    """A fresh abstract address; it names the process that listens."""
    own = ProcessId.own()
    return f"{_PREFIX}{own.pid}-{own.start_ticks}-{uuid.uuid4().hex}"


def listener_of(address: str) -> ProcessId:
    """The process that listens at an address `own_address` made there."""
    parts = address.removeprefix(_PREFIX).split("-")
    if not address.startswith(_PREFIX) or len(parts) != 3 or not all(p.isdecimal() for p in parts[:2]):
        raise ReshardError(
            f"{address!r} is no address of a receiver; pass what the engine's prepare_sync returned"
        )
    return ProcessId(int(parts[0]), int(parts[1]))


class Listener:
    """The receiver's end: bound once, talks to one sender at a time, knows each by its ZMQ identity."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.bind(address)

    def send(self, sender: bytes, message: Message) -> None:
        """Queues a message; to a sender that is gone it is dropped."""
        self._socket.send_multipart([sender, encode(message)])

    def receive(
        self, deadline: float, waiting_for: str, peer: ProcessId | None = None
    ) -> tuple[bytes, AnyMessage | ReshardError]:
        """(sender, message); a malformed message comes back as the error, for the caller to answer it."""
        _wait(self._socket, deadline, waiting_for, peer)
        sender, *frames = self._socket.recv_multipart()
        try:
            return sender, decode(b"".join(frames))
        except ReshardError as error:
            return sender, error

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MILLISECONDS)
        self._context.term()


class Dialer:
    """The sender's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def receive(self, deadline: float, waiting_for: str, peer: ProcessId | None = None) -> AnyMessage:
        _wait(self._socket, deadline, waiting_for, peer)
        return decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MILLISECONDS)
        self._context.term()


def _configure(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())


def _wait(socket: zmq.Socket, deadline: float, waiting_for: str, peer: ProcessId | None) -> None:
    """Until a message is there; ReshardError at the deadline (monotonic) or when the peer process ended."""
    started = time.monotonic()
    while not socket.poll(_POLL_MILLISECONDS):
        if peer is not None and not peer.alive():
            if socket.poll(0):  # its last message may have come after the poll above
                return
            raise ReshardError(f"process {peer.pid} ended while this side waited for {waiting_for}")
        if time.monotonic() > deadline:
            raise ReshardError(
                f"no {waiting_for} within {time.monotonic() - started:.1f} s"
                + (f" from process {peer.pid}" if peer else "")
                + "; raise sync.deadline_seconds if the peer was only slow"
            )
