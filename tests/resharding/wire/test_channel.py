"""Ends of a channel that were not closed."""

import gc
import time

import pytest

from mrl.resharding.wire.channel import Dialer, Listener
from mrl.resharding.wire.messages import StillWaiting
from tests.resharding.wires import End


def forget(host: str | None) -> None:
    """Drop both ends in a reference cycle, as an error's frames do, with an unread message."""
    gc.disable()
    listener = Listener(host)
    ends: list[object] = [listener, dialer := Dialer(listener.address)]
    listener.close()
    dialer.send(StillWaiting(session_id=""))
    ends.append(ends)
    del listener, dialer, ends
    gc.collect()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_ends_that_were_never_closed_are_collected_without_waiting(host: str | None) -> None:
    process = End(target=forget, args=(host,), daemon=True)
    process.start()
    process.join(240)
    hung = process.is_alive()
    process.kill()
    assert not hung and process.exitcode == 0


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_an_end_may_be_closed_twice(host: str | None) -> None:
    listener = Listener(host)
    dialer = Dialer(listener.address)
    dialer.send(StillWaiting(session_id="a"))
    _, message = listener.receive(time.monotonic() + 60, "a message")
    assert message == StillWaiting(session_id="a")
    for end in (dialer, dialer, listener, listener):
        end.close()
