"""A session's bytes come while the engine serves; only `receive` loads them, and an error changes nothing."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.planner.plan import Plan
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.run_session import SentSession
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import ReceiverState, Session
from mrl.resharding.wire.mesh_link import MeshLink
from tests.resharding.exchanges import SYNC, Receiving, Shelf, exchange, kill_self, model, opened
from tests.resharding.faults import change_messages, flip_a_bit
from tests.resharding.wires import MESHES, End, Wire, store

PLAN, VALUES = model()
OTHERS = [value + 1 for value in VALUES]


@pytest.fixture(params=MESHES)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    meeting = store()
    yield Wire(request.param, meeting.port)
    del meeting


@pytest.fixture
def receiver(wire: Wire) -> Iterator[Receiver]:
    made = wire.receiver(30.0)
    yield made
    made.close()


def with_all_buckets(sender: WeightSender, plan: Plan = PLAN) -> WeightSender:
    """Let the receiver have a bucket for each window, as with sync.overlap."""
    assert isinstance(sender._link, MeshLink)
    sender._link._mesh.num_buckets = len(plan.part(1).windows)
    return sender


@pytest.fixture
def sender(wire: Wire, receiver: Receiver) -> Iterator[WeightSender]:
    made = with_all_buckets(wire.sender(receiver.address, SYNC))
    yield made
    made.close()


def sent_ahead(
    sender: WeightSender, receiver: Receiver, version: int, values: list[torch.Tensor]
) -> tuple[Session, SentSession]:
    """Stage a session of an engine that serves, and send it until everything was taken."""
    session = Session.new(receiver.progress.version, version, PLAN.digest)
    receiver.stage(session)
    in_flight = opened(sender, session, PLAN, values)
    in_flight.send(until_taken=True)
    return session, in_flight


def loaded(receiver: Receiver, session: Session, in_flight: SentSession) -> Shelf:
    shelf = Shelf()
    receiving = Receiving(receiver, session, shelf)
    in_flight.commit()
    assert receiving.end() is None
    return shelf


def has(shelf: Shelf, values: list[torch.Tensor]) -> bool:
    return all(torch.equal(shelf.tensors[f"t{n}"], value) for n, value in enumerate(values))


def test_staged_bytes_are_loaded_by_receive_alone(sender: WeightSender, receiver: Receiver) -> None:
    """Direct and staged sessions take turns; the trainer's parameters may change before the commit."""
    exchange(sender, receiver, PLAN, VALUES, 0)
    for version in (1, 2):
        changing = [value + version for value in VALUES]
        session, in_flight = sent_ahead(sender, receiver, version, changing)
        for value in changing:
            value.zero_()
        assert receiver.progress.serving and receiver.progress.version == version - 1
        shelf = loaded(receiver, session, in_flight)
        assert has(shelf, [value + version for value in VALUES])
        assert receiver.progress.serving and receiver.progress.version == version
    exchange(sender, receiver, PLAN, OTHERS, 3)


def test_a_first_session_may_be_staged(sender: WeightSender, receiver: Receiver) -> None:
    session, in_flight = sent_ahead(sender, receiver, 0, VALUES)
    assert receiver.progress.state is ReceiverState.IDLE
    assert has(loaded(receiver, session, in_flight), VALUES)


def test_a_bit_that_changes_before_loading_is_not_committed(sender: WeightSender, receiver: Receiver) -> None:
    exchange(sender, receiver, PLAN, VALUES, 0)
    session, in_flight = sent_ahead(sender, receiver, 1, OTHERS)
    receiver._open_inbox().kept(2, 8)[5] ^= 1
    shelf = Shelf()
    receiving = Receiving(receiver, session, shelf)
    with pytest.raises(WeightSyncError, match="differ from the trainer's parameters"):
        in_flight.commit()
    assert "differ from the trainer's parameters" in str(receiving.end()) and shelf.aborts == 1
    assert receiver.progress.state is ReceiverState.FAILED
    session = Session.new(0, 1, PLAN.digest)
    receiver.stage(session)
    in_flight = opened(sender, session, PLAN, OTHERS)
    in_flight.send(until_taken=True)
    assert has(loaded(receiver, session, in_flight), OTHERS)


def test_a_fault_while_staging_leaves_the_engine_serving(
    sender: WeightSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(sender, receiver, PLAN, VALUES, 0)
    with monkeypatch.context() as patch:
        flip_a_bit(patch, message=3)
        with pytest.raises(WeightSyncError, match="do not match the digest"):
            sent_ahead(sender, receiver, 1, OTHERS)
    assert receiver.progress.serving and receiver.progress.version == 0
    shelf = Shelf()
    staged = receiver._staged
    assert staged is not None
    with pytest.raises(WeightSyncError, match="could not be received"):
        receiver.receive(staged.session, shelf)
    assert receiver.progress.serving and not shelf.aborts
    session, in_flight = sent_ahead(sender, receiver, 1, OTHERS)
    assert has(loaded(receiver, session, in_flight), OTHERS)


def test_a_session_that_never_opens_does_not_keep_the_next_one_waiting(
    sender: WeightSender, receiver: Receiver
) -> None:
    exchange(sender, receiver, PLAN, VALUES, 0)
    receiver.deadline_seconds = 3600.0
    receiver.stage(Session.new(0, 1, PLAN.digest))
    staged, session, shelf = receiver._staged, Session.new(0, 1, PLAN.digest), Shelf()
    receiving = Receiving(receiver, session, shelf)
    assert staged is not None
    staged.join(30)
    assert not staged.is_alive(), "it still waits for its sender"
    in_flight = opened(sender, session, PLAN, OTHERS)
    in_flight.send()
    in_flight.commit()
    assert receiving.end() is None and has(shelf, OTHERS)


def test_a_session_that_was_taken_may_be_given_up_for_another(
    sender: WeightSender, receiver: Receiver
) -> None:
    exchange(sender, receiver, PLAN, VALUES, 0)
    _, in_flight = sent_ahead(sender, receiver, 1, OTHERS)
    in_flight.give_up("the next session takes its place")
    assert has(exchange(sender, receiver, PLAN, OTHERS, 1), OTHERS)


def test_a_second_session_does_not_disturb_the_staged_one(sender: WeightSender, receiver: Receiver) -> None:
    exchange(sender, receiver, PLAN, VALUES, 0)
    session, in_flight = sent_ahead(sender, receiver, 1, OTHERS)
    for call in (receiver.stage, lambda stale: receiver.receive(stale, Shelf())):
        with pytest.raises(WeightSyncError, match="refused"):
            call(Session.new(5, 6, PLAN.digest))
    assert has(loaded(receiver, session, in_flight), OTHERS)


@pytest.mark.parametrize("point", ["tables", "window", "end"])
def test_a_killed_sender_leaves_the_engine_serving(wire: Wire, point: str) -> None:
    """It dies before it sends, in the middle, or after everything was taken, when loading has begun."""
    receiver = wire.receiver(120.0)
    session = Session.new(-1, 0, PLAN.digest)
    process = End(target=send_ahead_and_die, args=(wire, point, receiver.address, session), daemon=True)
    receiver.stage(session)
    process.start()
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|process {process.pid} closed"):
        receiver.receive(session, Shelf())
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert receiver.progress.state is (ReceiverState.FAILED if point == "end" else ReceiverState.IDLE)
    sender = with_all_buckets(wire.sender(receiver.address, SYNC))
    assert has(exchange(sender, receiver, PLAN, VALUES, 0), VALUES)
    receiver.close()
    sender.close()


def send_ahead_and_die(wire: Wire, point: str, address: str, session: Session) -> None:
    sender = with_all_buckets(wire.sender(address, SYNC))
    left = [3 if point == "window" else 0]

    def die(message: Any) -> Any:
        if message.kind == point:
            if not left[0]:
                kill_self()
            left[0] -= 1
        return message

    change_messages(sender, die)
    in_flight = opened(sender, session, PLAN, VALUES)
    in_flight.send(until_taken=True)
    in_flight.commit()


def stage_and_die(wire: Wire, pipe: Any) -> None:
    receiver = wire.receiver(20.0)
    session = Session.new(-1, 0, PLAN.digest)
    pipe.send((receiver.address, session))
    take = receiver._window

    def die(*arguments: Any) -> torch.Tensor:
        return kill_self() if arguments[2] == 2 else take(*arguments)  # type: ignore[return-value]

    receiver._window = die  # type: ignore[method-assign]
    receiver.stage(session)
    threading.Event().wait(60)


def test_a_receiver_killed_while_staging_is_noticed(wire: Wire) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = End(target=stage_and_die, args=(wire, theirs), daemon=True)
    process.start()
    address, session = ours.recv()
    sender = with_all_buckets(wire.sender(address, SYNC.model_copy(update={"deadline_seconds": 120.0})))
    in_flight = opened(sender, session, PLAN, VALUES, 120.0)
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|connection to tcp://.* closed"):
        in_flight.send(until_taken=True)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    sender.close()


def test_a_silent_sender_does_not_keep_a_receiver_from_closing(
    sender: WeightSender, receiver: Receiver
) -> None:
    """The thread waits for bytes that were announced and do not come."""
    session, announced = Session.new(-1, 0, PLAN.digest), threading.Event()
    in_flight = opened(sender, session, PLAN, VALUES)
    receiver.stage(session)
    lane = in_flight.lane
    assert lane is not None
    lane.start = lambda *arguments: announced.set()  # type: ignore[method-assign]
    sending = threading.Thread(target=failing(lambda: in_flight.send(until_taken=True)), daemon=True)
    sending.start()
    assert announced.wait(30)
    receiver.close()
    sending.join(60)
    assert not sending.is_alive()


def failing(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(WeightSyncError):
            call()

    return run


def test_shared_memory_is_not_staged() -> None:
    wire = Wire("shared_memory")
    receiver = wire.receiver(30.0)
    sender = wire.sender(receiver.address, SYNC)
    session = Session.new(-1, 0, PLAN.digest)
    receiver.stage(session)
    with pytest.raises(WeightSyncError, match="cannot be received while the engine serves"):
        opened(sender, session, PLAN, VALUES).send(until_taken=True)
    exchange(sender, receiver, PLAN, VALUES, 0)
    receiver.close()
    sender.close()
