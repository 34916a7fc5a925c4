"""The contract of every transport: every ending is bounded, named, and leaves nothing."""

import math
import os
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import ReceiverState, Session
from mrl.resharding.wire.channel import Dialer
from tests.resharding.exchanges import SYNC, Receiving, Shelf, announce, exchange, model, send, whole_plan
from tests.resharding.faults import after, change_messages, flip_a_bit
from tests.resharding.footprint import Footprint, require_no_leak
from tests.resharding.wires import Wire


@pytest.mark.parametrize("sessions", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_sessions_leave_memory_descriptors_threads_and_mappings_alone(
    sender: WeightSender, receiver: Receiver, sessions: int
) -> None:
    plan, values = model(sizes=(256, 257, 900))
    for version in range(10):
        exchange(sender, receiver, plan, values, version)
    marks = [Footprint.now()]
    for part in np.array_split(range(10, 10 + sessions), 4):
        for version in map(int, part):
            exchange(sender, receiver, plan, values, version)
        marks.append(Footprint.now())
    require_no_leak(marks)


@pytest.mark.parametrize("point", ["start", "t3", "t29", "finish"])
def test_a_slow_receiver_loses_nothing(sender: WeightSender, receiver: Receiver, point: str) -> None:
    """With 30 buckets of data through two buffers, an early refill would overwrite bytes not yet taken."""
    plan, values = model(sizes=(256,) * 30)
    shelf = Shelf(point, lambda: time.sleep(0.3))
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, shelf)
    send(sender, session, plan, values)
    assert thread.end() is None
    assert all(torch.equal(shelf.tensors[f"t{i}"], value) for i, value in enumerate(values))


EDGES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "odd sizes of mixed types in one bucket": [
        ("float8_e4m3fn", (5,)), ("float32", (3,)), ("bfloat16", ()), ("uint8", (1,)), ("int64", (1, 2)),
        ("float8_e4m3fn", (7,)),
    ],
    "one byte over a bucket": [("uint8", (1025,)), ("float32", (1,))],
    "exactly one bucket": [("float32", (256,))],
    "nothing at all": [],
}  # fmt: skip


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_types_and_sizes_arrive_byte_for_byte(sender, receiver, edge) -> None:
    torch.manual_seed(3)
    weights = {}
    for number, (dtype, shape) in enumerate(EDGES[edge]):
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        weights[f"t{number}"] = data.view(getattr(torch, dtype)).view(shape)
    plan, shelf = whole_plan(weights), Shelf()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, shelf)
    send(sender, session, plan, list(weights.values()))
    assert thread.end() is None and shelf.tensors.keys() == weights.keys()
    for name, sent in weights.items():
        got = shelf.tensors[name]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8)), name


def raise_error() -> None:
    raise ValueError("the consumer broke on purpose")


@pytest.mark.parametrize("point", ["start", "t0", "t2", "t6", "finish"])
def test_a_receiver_that_raises_is_heard_by_the_sender_and_a_resend_heals(sender, receiver, point) -> None:
    plan, values = model()
    exchange(sender, receiver, plan, values, 0)
    shelf, session = Shelf(point, raise_error), Session.new(0, 1, plan.digest)
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(WeightSyncError, match="the consumer broke on purpose") as caught:
        send(sender, session, plan, values)
    assert "raise_error" in str(caught.value), "the remote traceback is carried"
    assert isinstance(thread.end(), ValueError) and shelf.aborts == 1
    assert receiver.progress.state is ReceiverState.FAILED and receiver.progress.version == 0
    exchange(sender, receiver, *model(seed=1), 1)


@pytest.mark.parametrize("full", [False, True])
def test_a_flipped_bit_is_refused(sender, receiver, monkeypatch, full: bool) -> None:
    plan, values = model()
    flip_a_bit(monkeypatch, message=3)
    session, shelf = Session.new(-1, 0, plan.digest, full=full), Shelf()
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(WeightSyncError, match="received from trainer rank 0 do not match the digest"):
        send(sender, session, plan, values)
    assert thread.end() is not None and shelf.aborts == 1 and not receiver.progress.serving
    exchange(sender, receiver, plan, values, 0)


def test_a_sender_of_another_session_is_refused_and_does_no_harm(wire, sender, receiver) -> None:
    plan, values = model()
    stale = wire.sender(receiver.address, SYNC)
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(WeightSyncError, match=r"refused.*waits for session"):
        announce(stale, Session.new(-1, 0, plan.digest), plan)
    send(sender, session, plan, values)
    assert thread.end() is None and receiver.progress.version == 0
    stale.close()


def test_a_second_sender_during_a_session_is_refused_and_the_first_goes_on(wire, sender, receiver) -> None:
    plan, values = model()
    second, heard = wire.sender(receiver.address, SYNC), []

    def intrude() -> None:
        try:
            announce(second, Session.new(-1, 0, plan.digest), plan)
        except WeightSyncError as error:
            heard.append(str(error))

    intruder = threading.Thread(target=intrude)
    session, shelf = Session.new(-1, 0, plan.digest), Shelf("t1", lambda: (intruder.start(), time.sleep(0.3)))
    thread = Receiving(receiver, session, shelf)
    send(sender, session, plan, values)
    assert thread.end() is None and receiver.progress.version == 0
    intruder.join(10)
    assert not intruder.is_alive()
    assert len(heard) == 1 and "is in progress with process" in heard[0]
    second.close()


@pytest.mark.parametrize("field", ["from_version", "to_version", "digest"])
def test_sides_that_disagree_about_the_session_both_refuse(sender, receiver, field) -> None:
    plan, _ = model()
    session = Session.new(-1, 0, plan.digest)
    other = Session(
        **{f: getattr(session, f) for f in Session.__slots__} | {field: "other" if field == "digest" else 7}
    )
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(WeightSyncError, match="expected session"):
        announce(sender, other, plan)
    assert isinstance(thread.end(), WeightSyncError)
    exchange(sender, receiver, *model(), 0)


@pytest.mark.parametrize("call", ["finish", "commit", "send_window"])
def test_calls_outside_a_session_are_refused_and_harm_nothing(sender, receiver, call) -> None:
    plan, values = model()
    with pytest.raises(WeightSyncError, match="no open session"):
        {"finish": sender.finish, "commit": sender.commit, "send_window": lambda: sender.send_window([])}[
            call
        ]()
    exchange(sender, receiver, plan, values, 0)


def test_a_session_cannot_be_opened_twice(sender: WeightSender, receiver: Receiver) -> None:
    plan, values = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    announce(sender, session, plan)
    with pytest.raises(WeightSyncError, match="this sender has session"):
        announce(sender, Session.new(-1, 0, plan.digest), plan)
    sender.abort("given up")
    assert isinstance(thread.end(), WeightSyncError)
    exchange(sender, receiver, plan, values, 0)


def test_a_receiver_that_fails_before_all_have_met_stops_the_others_at_once(wire, sender, receiver) -> None:
    plan, values = model()
    before, receiver.deadline_seconds = receiver.deadline_seconds, 120.0
    after(receiver, "told", raise_error)
    patient = wire.sender(receiver.address, SYNC.model_copy(update={"deadline_seconds": 120.0}))
    session, started = Session.new(-1, 0, plan.digest), time.monotonic()
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(WeightSyncError, match="the consumer broke on purpose"):
        send(patient, session, plan, values, 120.0)
    assert isinstance(thread.end(), ValueError) and time.monotonic() - started < 60
    receiver.deadline_seconds = before
    patient.close()
    exchange(sender, receiver, plan, values, 0)


def test_an_end_before_the_last_window_is_refused(sender: WeightSender, receiver: Receiver) -> None:
    plan, _ = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    announce(sender, session, plan)
    sender.connect()
    with pytest.raises(WeightSyncError, match="expected window 0, got SessionEnd"):
        sender.finish()
    assert thread.end() is not None and not receiver.progress.serving


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index": 1}, "expected window 0"),
        ({"offset": 4}, "should begin at byte 0"),
        ({"num_bytes": 2048}, "the parcels have 2048 bytes, but the bucket has 1024"),
    ],
)
def test_lengths_and_offsets_are_checked_before_use(sender, receiver, change, reason) -> None:
    """Change a field of the first window's message or of its first parcel."""
    plan, values = model()

    def lie(message: Any) -> Any:
        if message.kind != "window" or message.index:
            return message
        fields = message.model_dump()
        (fields if "index" in change else fields["messages"][0]).update(change)
        return type(message)(**fields)

    change_messages(sender, lie)
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(WeightSyncError, match=reason):
        send(sender, session, plan, values)
    assert isinstance(thread.end(), WeightSyncError)


def test_garbage_on_the_socket_is_refused_without_harm(sender: WeightSender, receiver: Receiver) -> None:
    plan, values = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    stranger = Dialer(receiver.address)
    for garbage in (b"", b"{}", b"[" * 10000, pickle.dumps(os.system), b'{"kind":"open","session_id":1}'):
        stranger._socket.send(garbage)
        assert stranger._socket.poll(30000) and b"malformed" in stranger._socket.recv()
    stranger.close()
    send(sender, session, plan, values)
    assert thread.end() is None and receiver.progress.version == 0


def test_who_was_not_given_the_address_is_not_heard(sender: WeightSender, receiver: Receiver) -> None:
    if not receiver.address.startswith("tcp"):
        return  # of the other transports the kernel keeps strangers out
    endpoint = receiver.address.rpartition("/")[0]
    plan, values = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain, context.socket(zmq.DEALER) as guessed:
        guessed.curve_publickey, guessed.curve_secretkey = zmq.curve_keypair()
        guessed.curve_serverkey = zmq.curve_keypair()[0]
        for socket in (plain, guessed):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            socket.send(b"{}")
        assert not plain.poll(300) and not guessed.poll(300)
    send(sender, session, plan, values)
    assert thread.end() is None and receiver.progress.version == 0


def test_nobody_comes(receiver: Receiver) -> None:
    receiver.deadline_seconds = 0.3
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="no the sender of session"):
        receiver.receive(Session.new(-1, 0, "d"), Shelf())
    assert time.monotonic() - started < 20


def test_nobody_answers(wire: Wire, receiver: Receiver) -> None:
    sender = wire.sender(receiver.address, SYNC.model_copy(update={"deadline_seconds": 0.3}))
    plan, values = model()
    with pytest.raises(WeightSyncError, match="no the receiver to accept"):
        send(sender, Session.new(-1, 0, plan.digest), plan, values, 1.0)
    sender.close()
