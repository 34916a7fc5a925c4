"""`python -m benchmarks.resharding.control`: a weight sync's control messages over its channel and over a TCPStore.

Round trips of one message of 200 bytes between two processes, processor time of the asking one, and after how long it
knows that the other was killed. docs/design/weight-sync.md says what follows.
"""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from torch._C._distributed_c10d import TCPStore

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Dialer, Listener
from mrl.resharding.wire.messages import Failed

ROUND_TRIPS, WARM_UP, ROUNDS = 2000, 50, 3
DEADLINE_SECONDS = 60.0
STORE_DEATH_SECONDS = 5.0
_TEXT = "x" * 150
_HOST = "127.0.0.1"

Figures = tuple[float, float, str]
"""Microseconds of a round trip, of these on the processor, and what is said of the peer's death."""


def over_channel(host: str | None) -> Figures:
    """`host`: None for the socket of one slot."""
    addresses = multiprocessing.get_context("spawn").Queue()
    peer = _started(_answer_channel, addresses, host)
    dialer, message = (
        Dialer(addresses.get(timeout=DEADLINE_SECONDS)),
        Failed(session_id="s", error=_TEXT),
    )

    def ask(_: int) -> None:
        dialer.send(message)
        dialer.receive(time.monotonic() + DEADLINE_SECONDS, "an answer")

    seconds, cpu = _timed(ask)
    peer.kill()
    start = time.monotonic()
    try:
        ask(0)
        death = "not seen"
    except WeightSyncError as error:
        death = f"{time.monotonic() - start:.2f} s: {error}"
    dialer.close()
    peer.join()
    return seconds, cpu, death


def over_store() -> Figures:
    """With two keys a message, removed once read."""
    limit = datetime.timedelta(seconds=DEADLINE_SECONDS)
    server = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    peer = _started(_answer_store, server.port)
    store = TCPStore(_HOST, server.port, is_master=False, timeout=limit)

    def ask(number: int) -> None:
        store.set(f"to{number}", _TEXT)
        store.wait([f"from{number}"])
        store.get(f"from{number}")
        store.delete_key(f"from{number}")

    seconds, cpu = _timed(ask)
    peer.kill()
    peer.join()
    try:
        store.wait([f"from{WARM_UP + ROUND_TRIPS}"], datetime.timedelta(seconds=STORE_DEATH_SECONDS))
        death = "answered"
    except Exception:
        death = f"not seen in {STORE_DEATH_SECONDS:g} s"
    stranger = TCPStore(_HOST, server.port, is_master=False, timeout=limit)
    stranger.set("session", "a stranger's")
    return seconds, cpu, f"{death}; read of a session: {store.get('session').decode()!r}"


def _timed(ask: Callable[[int], None]) -> tuple[float, float]:
    for number in range(WARM_UP):
        ask(number)
    start, cpu = time.monotonic(), time.process_time()
    for number in range(WARM_UP, WARM_UP + ROUND_TRIPS):
        ask(number)
    return (time.monotonic() - start) / ROUND_TRIPS * 1e6, (time.process_time() - cpu) / ROUND_TRIPS * 1e6


def _started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _answer_channel(addresses: Any, host: str | None) -> None:
    listener = Listener(host)
    addresses.put(listener.address)
    while True:
        sender, message = listener.receive(time.monotonic() + DEADLINE_SECONDS, "a message")
        assert not isinstance(message, WeightSyncError)
        listener.send(sender, message)


def _answer_store(port: int) -> None:
    store = TCPStore(_HOST, port, is_master=False, timeout=datetime.timedelta(seconds=DEADLINE_SECONDS))
    for number in range(WARM_UP + ROUND_TRIPS):
        store.wait([f"to{number}"])
        text = store.get(f"to{number}").decode()
        store.delete_key(f"to{number}")
        store.set(f"from{number}", text)


def main() -> None:
    ways = {
        "one slot": lambda: over_channel(None),
        "network": lambda: over_channel(_HOST),
        "store": over_store,
    }
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(way())
    for name, rows in found.items():
        seconds = statistics.median(seconds for seconds, _, _ in rows)
        cpu = statistics.median(cpu for _, cpu, _ in rows)
        print(
            f"{name:10} {seconds:6.0f} us a round trip, {cpu:4.0f} us of it processor; death: {rows[-1][2]}"
        )


if __name__ == "__main__":
    main()
