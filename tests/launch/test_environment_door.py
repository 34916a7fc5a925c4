"""Connections for environments' hosts: each proves which host it is for, once, and nobody else holds a start up."""

import secrets
import socket
from collections.abc import Iterator

import pytest

from mrl.launch.workers.environment_nodes import MOST_UNPROVED, Door, proof

SECRET = secrets.token_bytes(32)
SECONDS = 120.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def door(listener: socket.socket) -> Door:
    return Door(listener, SECRET)


def dialled(listener: socket.socket, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(listener.getsockname(), timeout=SECONDS)
    connection.sendall(data)
    return connection


def joined(ours: socket.socket, theirs: socket.socket) -> bool:
    return ours.getsockname() == theirs.getpeername()


def test_silent_connections_are_not_waited_for(listener: socket.socket, door: Door) -> None:
    silent = [dialled(listener) for _ in range(3)]
    with dialled(listener, proof(SECRET, 0) + b"more") as ours:
        with door.connection(0, SECONDS) as connection:
            assert joined(ours, connection) and connection.recv(9) == b"more", "which is the host's to read"
        for one in silent:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)  # nobody gave up on it: it was listened to beside the others
            one.close()


def test_a_connection_that_comes_early_is_for_its_own_host(listener: socket.socket, door: Door) -> None:
    with dialled(listener, proof(SECRET, 1)) as later, dialled(listener, proof(SECRET, 0)) as first:
        with door.connection(0, SECONDS) as connection:
            assert joined(first, connection)
        with door.connection(1, SECONDS) as connection:
            assert joined(later, connection)


def test_what_was_overheard_is_worth_nothing(listener: socket.socket, door: Door) -> None:
    overheard = proof(SECRET, 0)
    with dialled(listener, overheard), door.connection(0, SECONDS):
        pass
    others = [
        overheard,
        proof(secrets.token_bytes(32), 1),
        overheard[:8] + bytes(32),
        bytes(40),
        b"\1" + overheard[1:],
    ]
    strangers = [dialled(listener, data) for data in others]
    with dialled(listener, proof(SECRET, 1)) as ours, door.connection(1, SECONDS) as connection:
        assert joined(ours, connection)
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b"", "it was closed"


def test_a_crowd_is_sent_away(listener: socket.socket, door: Door) -> None:
    crowd = [dialled(listener) for _ in range(MOST_UNPROVED + 5)]
    with dialled(listener, proof(SECRET, 3)) as ours, door.connection(3, SECONDS) as connection:
        assert joined(ours, connection)
    assert [one.recv(1) for one in crowd[:5]] == [b""] * 5
    for one in [*crowd, *door._said]:
        one.close()


def test_a_connection_that_does_not_come_is_named(door: Door) -> None:
    with pytest.raises(TimeoutError, match="host 3"):
        door.connection(3, 0.01)
