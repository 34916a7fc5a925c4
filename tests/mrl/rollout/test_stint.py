"""How long a call lasts, and the bell that ends it; the sockets are real."""

from __future__ import annotations

import socket
import time

import pytest

from mrl.rollout.stint import Bell, Stint, ring

HOUR = 3600.0


@pytest.fixture
def bell() -> Bell:
    return Bell("127.0.0.1")


def goes_on(bell: Bell, stint: Stint, *, made: int = 1, ago: float = 0.0) -> bool:
    return bell.wants_more(stint, made=made, since=time.monotonic() - ago)


def ends(bell: Bell, stint: Stint) -> bool:
    """A datagram takes its time, also on one machine."""
    deadline = time.monotonic() + 20
    while goes_on(bell, stint):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_a_call_makes_its_ticks_and_no_more_without_seconds(bell: Bell) -> None:
    assert not goes_on(bell, Stint(1))
    assert goes_on(bell, Stint(1, beats=3), made=2) and not goes_on(bell, Stint(1, beats=3), made=3)


def test_seconds_count_from_its_beginning(bell: Bell) -> None:
    stint = Stint(1, seconds=HOUR)
    assert goes_on(bell, stint, made=1000, ago=HOUR / 2) and not goes_on(bell, stint, ago=2 * HOUR)


def test_who_rings_ends_the_calls_up_to_that_one(bell: Bell) -> None:
    early, late = Stint(7, seconds=HOUR), Stint(8, seconds=HOUR)
    assert goes_on(bell, early)
    ring([bell.address], 7)
    assert ends(bell, early), "nobody was heard"
    assert goes_on(bell, late)
    ring([bell.address], 3)
    ring([bell.address], 8)
    assert ends(bell, late) and not goes_on(bell, early)


def test_a_call_makes_its_ticks_whoever_rings(bell: Bell) -> None:
    ring([bell.address], 9)
    assert ends(bell, Stint(9, seconds=HOUR)) and goes_on(bell, Stint(9, beats=4), made=3)


def test_strangers_are_not_heard(bell: Bell) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        host, port, key = bell.address
        for said in (b"", b"ring", b"x" * 24, b"x" * 4000, key, key + b"\xff" * 7, b"x" * 16 + b"\x01" * 8):
            stranger.sendto(said, (host, port))
    ring([bell.address], 1)
    assert ends(bell, Stint(1, seconds=HOUR)) and goes_on(bell, Stint(2, seconds=HOUR))


def test_nobody_is_there(bell: Bell) -> None:
    """The others are rung for."""
    ring([("", 0, b""), ("255.255.255.255", 9, b"key"), bell.address], 5)
    assert ends(bell, Stint(5, seconds=HOUR))


def test_its_numbers_make_it_again() -> None:
    stint = Stint(3, 2, 0.5, 40)
    assert Stint(*stint.numbers()) == stint
