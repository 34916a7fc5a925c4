"""SIGKILL of either end at each point of a session, over every transport, is noticed at once."""

import multiprocessing
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import ReceiverState, Session
from tests.resharding.exchanges import SYNC, Receiving, Shelf, exchange, kill_self, model, send
from tests.resharding.faults import after, change_messages
from tests.resharding.wires import End, Wire


def receive_and_die(wire: Wire, point: str, pipe: Any) -> None:
    receiver = wire.receiver(20.0)
    plan, _ = model()
    session = Session.new(-1, 0, plan.digest)
    pipe.send((receiver.address, session))
    if point == "open":
        kill_self()
    if point in ("accepted", "verified"):
        after(receiver, point, kill_self)
    receiver.receive(session, Shelf(point, kill_self))


@pytest.mark.parametrize("point", ["open", "accepted", "start", "t0", "t2", "t6", "finish", "verified"])
def test_a_killed_receiver_is_noticed_long_before_the_deadline(wire: Wire, point: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = End(target=receive_and_die, args=(wire, point, theirs), daemon=True)
    process.start()
    address, session = ours.recv()
    sender = wire.sender(address, SYNC.model_copy(update={"deadline_seconds": 120.0}))
    plan, values = model()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|connection to tcp://.* closed"):
        send(sender, session, plan, values, 120.0)
    assert time.monotonic() - started < 60
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    sender.close()
    fresh = wire.receiver(30.0)
    again = wire.sender(fresh.address, SYNC)
    exchange(again, fresh, plan, values, 0)
    fresh.close()
    again.close()


def test_a_receiver_that_is_gone_does_not_keep_the_others_waiting() -> None:
    """The dead receiver comes first; its end is noticed before the other's session opens."""
    wire, (ours, theirs) = Wire("shared_memory"), multiprocessing.Pipe()
    process = End(target=receive_and_die, args=(wire, "open", theirs), daemon=True)
    process.start()
    address, session = ours.recv()
    process.join(60)
    plan, values = model()
    living, shelf = wire.receiver(600.0), Shelf()
    sync = SYNC.model_copy(update={"deadline_seconds": 600.0})
    gone, sender = wire.sender(address, sync), wire.sender(living.address, sync)
    receiving = Receiving(living, session, shelf)
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|connection to .* closed"):
        send(sender, session, plan, values, 600.0, others=[gone])
    error = receiving.end()
    assert isinstance(error, WeightSyncError) and "the sender gave" in str(error)
    exchange(sender, living, plan, values, 0)
    for end in (gone, sender, living):
        end.close()


def send_and_die(wire: Wire, point: str, address: str, session: Session) -> None:
    sender = wire.sender(address, SYNC)
    plan, values = model()
    left = [3 if point == "window" else 0]

    def die(message: Any) -> Any:
        """Die in place of a message, or (confirmed) soon after the commit was sent."""
        if point == "confirmed" and message.kind == "commit":
            threading.Timer(0.1, kill_self).start()
        if message.kind == point:
            if not left[0]:
                time.sleep(0.1)  # lets what was sent before arrive
                kill_self()
            left[0] -= 1
        return message

    change_messages(sender, die)
    send(sender, session, plan, values, 20.0)
    time.sleep(60)  # until the timer of a confirmed commit kills this process


@pytest.mark.parametrize("point", ["tables", "window", "end", "commit"])
def test_a_killed_sender_is_noticed_and_the_receiver_serves_nothing(wire: Wire, point: str) -> None:
    receiver = wire.receiver(120.0)
    plan, values = model()
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    process = End(target=send_and_die, args=(wire, point, receiver.address, session), daemon=True)
    process.start()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|process {process.pid} closed"):
        receiver.receive(session, shelf)
    assert time.monotonic() - started < 60 and shelf.aborts == (point != "tables")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and receiver.progress.state is ReceiverState.FAILED
    sender = wire.sender(receiver.address, SYNC)
    exchange(sender, receiver, plan, values, 0)
    receiver.close()
    sender.close()
    assert "memfd:mrl-segment" not in Path("/proc/self/maps").read_text()


def test_a_sender_killed_after_its_commit_changes_nothing(wire: Wire, receiver: Receiver) -> None:
    plan, _ = model()
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    process = End(target=send_and_die, args=(wire, "confirmed", receiver.address, session), daemon=True)
    process.start()
    receiver.receive(session, shelf)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and receiver.progress.serving and len(shelf.tensors) == 7
