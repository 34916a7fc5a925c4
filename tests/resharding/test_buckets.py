"""The contract of every transport: between a real sender and a real receiver every ending is bounded, named, and leaves nothing."""

import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from models.manifest import CheckpointTensor, LocalTensor, Piece
from mrl.config.sync import SyncSection
from mrl.errors import ReshardError
from resharding import gather, gather_plan
from resharding.gather_plan import GatherPlan
from resharding.ranks import Ranks
from resharding.receiver import Receiver
from resharding.sender import WeightSender
from resharding.sending import SendStats
from resharding.session import Session, State, WireTensor
from resharding.wire.channel import Dialer
from resharding.wire.messages import Commit
from tests.resharding.feeding import plan_of
from tests.resharding.footprint import Footprint
from tests.resharding.wires import KINDS, PROCESSES, Wire, store

SYNC = SyncSection(bucket_bytes=1024, deadline_seconds=30.0)


class Shelf:
    """A consumer that keeps what it gets, and fails where it is told to."""

    processing_seconds = 0.0

    def __init__(self, fail_at: str | None = None, action: Callable[[], Any] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.aborts = 0
        self._fail_at, self._action = fail_at, action

    def start(self, tensors: list[WireTensor]) -> None:
        self._reach("start")

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._reach(name)
            assert name not in self.tensors
            self.tensors[name] = tensor

    def finish(self) -> None:
        self._reach("finish")

    def abort(self) -> None:
        self.aborts += 1
        self.tensors.clear()

    def _reach(self, point: str) -> None:
        if point == self._fail_at:
            assert self._action is not None
            self._action()


def model(
    seed: int = 0, sizes: tuple[int, ...] = (256, 257, 900, 3, 1, 64, 5000)
) -> tuple[GatherPlan, list[torch.Tensor]]:
    """Float tensors t0, t1, ...: equal to a bucket, one element over, and far larger are among them."""
    torch.manual_seed(seed)
    values = [torch.randn(size) for size in sizes]
    checkpoint = [CheckpointTensor(f"t{i}", (size,), "float32") for i, size in enumerate(sizes)]
    locals_ = [
        LocalTensor(c.name, 0, c.shape, c.dtype, (Piece(c.name, (0,), c.shape, (0,)),)) for c in checkpoint
    ]
    return gather_plan.build(checkpoint, [locals_], SYNC.bucket_bytes), values


@pytest.fixture(params=KINDS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    meeting = store()
    yield Wire(request.param, meeting.port)
    del meeting


@pytest.fixture
def receiver(wire: Wire) -> Iterator[Receiver]:
    end = wire.receiver(SYNC.deadline_seconds)
    yield end
    end.close()


@pytest.fixture
def sender(wire: Wire, receiver: Receiver) -> Iterator[WeightSender]:
    end = wire.sender(receiver.address, SYNC)
    yield end
    receiver.release()
    end.close()


def send(
    sender: WeightSender,
    session: Session,
    plan: GatherPlan,
    values: list[torch.Tensor],
    seconds: float = 30.0,
) -> SendStats:
    """This process is the only trainer rank."""
    return gather.send(
        [sender], session, plan, values, group=None, device=sender.device, deadline_seconds=seconds
    )


class Receiving(threading.Thread):
    """One `receive` in a thread of its own."""

    def __init__(self, receiver: Receiver, session: Session, consumer: Shelf) -> None:
        super().__init__(daemon=True)
        self._call = lambda: receiver.receive(session, consumer)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def end(self, seconds: float = 45.0) -> BaseException | None:
        self.join(seconds)
        assert not self.is_alive(), "the receiver did not return"
        return self.error


def exchange(
    sender: WeightSender, receiver: Receiver, plan: GatherPlan, values: list[torch.Tensor], version: int
) -> Shelf:
    """A whole session that must succeed."""
    shelf, session = Shelf(), Session.new(receiver.progress.version, version, plan.digest)
    thread = Receiving(receiver, session, shelf)
    stats = send(sender, session, plan, values)
    assert thread.end() is None and stats.num_bytes == plan.num_bytes
    assert receiver.progress.serving and receiver.progress.version == version
    assert [shelf.tensors[t.name].tolist() for t in plan.tensors] == [v.tolist() for v in values]
    return shelf


def test_several_sessions_map_the_buffers_once(sender: WeightSender, receiver: Receiver) -> None:
    maps = []
    for version in range(3):
        exchange(sender, receiver, *model(seed=version), version)
        maps.append(Path("/proc/self/maps").read_text().count("memfd:mrl-segment"))
    assert len(set(maps)) == 1


@pytest.mark.parametrize("sessions", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_sessions_leave_memory_descriptors_threads_and_mappings_alone(
    sender: WeightSender, receiver: Receiver, sessions: int
) -> None:
    plan, values = model(sizes=(256, 257, 900))
    for version in range(10):
        exchange(sender, receiver, plan, values, version)
    before = Footprint.now()
    for version in range(10, 10 + sessions):
        exchange(sender, receiver, plan, values, version)
    Footprint.now().require_as(before)


@pytest.mark.parametrize("point", ["start", "t3", "t29", "finish"])
def test_a_slow_receiver_loses_nothing(sender: WeightSender, receiver: Receiver, point: str) -> None:
    """With 30 buckets through two buffers, a refill too early would corrupt what was not yet taken."""
    plan, values = model(sizes=(256,) * 30)
    shelf = Shelf(point, lambda: time.sleep(0.3))
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, shelf)
    send(sender, session, plan, values)
    assert thread.end() is None
    assert all(torch.equal(shelf.tensors[f"t{i}"], value) for i, value in enumerate(values))


EDGES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "odd sizes of mixed types in one bucket": [
        ("float8_e4m3fn", (5,)), ("float32", (3,)), ("bfloat16", ()), ("uint8", (1,)), ("int64", (1, 2)), ("float8_e4m3fn", (7,)),
    ],
    "an empty tensor between others": [("float32", (4,)), ("float32", (0, 4)), ("bfloat16", (3,))],
    "one byte over a bucket": [("uint8", (1025,)), ("float32", (1,))],
    "exactly one bucket": [("float32", (256,))],
    "nothing at all": [],
}  # fmt: skip


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_types_and_sizes_arrive_byte_for_byte(
    sender: WeightSender, receiver: Receiver, edge: str
) -> None:
    torch.manual_seed(3)
    weights = {}
    for number, (dtype, shape) in enumerate(EDGES[edge]):
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        weights[f"t{number}"] = data.view(getattr(torch, dtype)).view(shape)
    plan, shelf = plan_of(weights, SYNC.bucket_bytes), Shelf()
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
def test_a_receiver_that_raises_is_heard_by_the_sender_and_a_resend_heals(
    sender: WeightSender, receiver: Receiver, point: str
) -> None:
    plan, values = model()
    exchange(sender, receiver, plan, values, 0)
    shelf, session = Shelf(point, raise_error), Session.new(0, 1, plan.digest)
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(ReshardError, match="the consumer broke on purpose") as caught:
        send(sender, session, plan, values)
    assert "raise_error" in str(caught.value), "the remote traceback is carried"
    assert isinstance(thread.end(), ValueError) and shelf.aborts == 1
    assert receiver.progress.state is State.FAILED and receiver.progress.version == 0
    exchange(sender, receiver, *model(seed=1), 1)


def test_a_flipped_bit_is_refused(
    sender: WeightSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, values = model()
    arrive, arrived = receiver._bytes, []

    def flip(*arguments: Any) -> torch.Tensor:
        data = arrive(*arguments)
        arrived.append(data.numel())
        if len(arrived) == 3:
            data[1] ^= 16
        return data

    monkeypatch.setattr(receiver, "_bytes", flip)
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(ReshardError, match=r"bucket 2: .* digest"):
        send(sender, session, plan, values)
    assert thread.end() is not None and shelf.aborts == 1 and not receiver.progress.serving
    monkeypatch.undo()
    exchange(sender, receiver, plan, values, 0)


def test_a_sender_of_another_session_is_refused_and_does_no_harm(
    wire: Wire, sender: WeightSender, receiver: Receiver
) -> None:
    plan, values = model()
    stale = wire.sender(receiver.address, SYNC)
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    thread = Receiving(receiver, session, shelf)
    with pytest.raises(ReshardError, match=r"refused.*waits for session"):
        stale.open(Session.new(-1, 0, plan.digest), plan.tensors)
    send(sender, session, plan, values)
    assert thread.end() is None and receiver.progress.version == 0
    stale.close()


def test_a_second_sender_during_a_session_is_refused_and_the_first_goes_on(
    wire: Wire, sender: WeightSender, receiver: Receiver
) -> None:
    plan, values = model()
    second, heard = wire.sender(receiver.address, SYNC), []

    def intrude() -> None:
        try:
            second.open(Session.new(-1, 0, plan.digest), plan.tensors)
        except ReshardError as error:
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
def test_sides_that_disagree_about_the_session_both_refuse(
    sender: WeightSender, receiver: Receiver, field: str
) -> None:
    plan, _ = model()
    session = Session.new(-1, 0, plan.digest)
    other = Session(
        **{f: getattr(session, f) for f in Session.__slots__} | {field: "other" if field == "digest" else 7}
    )
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(ReshardError, match="expected session"):
        sender.open(other, plan.tensors)
    assert isinstance(thread.end(), ReshardError)
    exchange(sender, receiver, *model(), 0)


@pytest.mark.parametrize("call", ["finish", "commit", "send", "send_window"])
def test_calls_outside_a_session_are_refused_and_harm_nothing(
    sender: WeightSender, receiver: Receiver, call: str
) -> None:
    plan, values = model()
    with pytest.raises(ReshardError, match="no open session"):
        {
            "finish": sender.finish,
            "commit": sender.commit,
            "send": lambda: sender.send([], 0),
            "send_window": lambda: sender.send_window(0, []),
        }[call]()
    exchange(sender, receiver, plan, values, 0)


def test_a_session_cannot_be_opened_twice(sender: WeightSender, receiver: Receiver) -> None:
    plan, values = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    sender.open(session, plan.tensors)
    with pytest.raises(ReshardError, match="this sender has session"):
        sender.open(Session.new(-1, 0, plan.digest), plan.tensors)
    sender.abort("given up")
    assert isinstance(thread.end(), ReshardError)
    exchange(sender, receiver, plan, values, 0)


def test_a_receiver_that_fails_before_all_have_met_stops_the_others_at_once(
    wire: Wire, sender: WeightSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, values = model()
    monkeypatch.setattr(receiver, "_seconds", 120.0)
    patient = wire.sender(receiver.address, SYNC.model_copy(update={"deadline_seconds": 120.0}))
    manifest = receiver._manifest

    def fail(session: Session) -> Any:
        manifest(session)
        raise ValueError("broken on purpose before the meeting")

    monkeypatch.setattr(receiver, "_manifest", fail)
    session, started = Session.new(-1, 0, plan.digest), time.monotonic()
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(ReshardError, match="broken on purpose before the meeting"):
        send(patient, session, plan, values, 120.0)
    assert isinstance(thread.end(), ValueError) and time.monotonic() - started < 60
    monkeypatch.undo()
    patient.close()
    exchange(sender, receiver, plan, values, 0)


def test_a_missing_tensor_is_named_and_nothing_is_committed(sender: WeightSender, receiver: Receiver) -> None:
    plan, values = model()
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    sender.open(session, plan.tensors)
    sender.connect()
    for window in plan.windows:
        if all(box.tensor != 6 for box in window.boxes):
            buffer = sender.next_buffer()
            gather._fill(buffer, window, plan, values, Ranks(None, 30.0, sender.device))
            gather._hand_over([sender], (window, buffer))
    with pytest.raises(ReshardError, match=r"1 of 7 tensors did not arrive.*t6"):
        sender.finish()
    assert thread.end() is not None and not receiver.progress.serving


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"used_bytes": 4096}, "claims 4096 bytes of a buffer of 1024"),
        ({"index": 1}, "expected bucket 0"),
        ({"start": 4}, "every byte comes once"),
        ({"offset": 1020}, "is not inside a bucket"),
        ({"offset": 2}, "is not inside a bucket"),
        ({"num_bytes": 2048}, "leave its 1024 bytes"),
        ({"tensor": 99}, "names tensor 99 of 7"),
    ],
)
def test_lengths_and_offsets_are_checked_before_use(
    sender: WeightSender,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, int],
    what: str,
) -> None:
    plan, values = model()
    post = sender._dialer.send

    def lie(message: Any) -> None:
        if message.kind == "bucket" and message.index == 0:
            fields = message.model_dump()
            (fields if next(iter(change)) in ("used_bytes", "index") else fields["spans"][0]).update(change)
            message = type(message)(**fields)
        post(message)

    monkeypatch.setattr(sender._dialer, "send", lie)
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, Shelf())
    with pytest.raises(ReshardError, match=what):
        send(sender, session, plan, values)
    assert isinstance(thread.end(), ReshardError)


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
    receiver._seconds = 0.3
    started = time.monotonic()
    with pytest.raises(ReshardError, match="no the sender of session"):
        receiver.receive(Session.new(-1, 0, "d"), Shelf())
    assert time.monotonic() - started < 20


def test_nobody_answers(wire: Wire, receiver: Receiver) -> None:
    sender = wire.sender(receiver.address, SYNC.model_copy(update={"deadline_seconds": 0.3}))
    plan, values = model()
    with pytest.raises(ReshardError, match="no the receiver to accept"):
        send(sender, Session.new(-1, 0, plan.digest), plan, values, 1.0)
    sender.close()


# -- a killed peer ------------------------------------------------------------------------------------------------


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def receive_and_die(wire: Wire, point: str, pipe: Any) -> None:
    receiver = wire.receiver(20.0)
    plan, _ = model()
    session = Session.new(-1, 0, plan.digest)
    pipe.send((receiver.address, session))
    accept = receiver._accept
    if point == "open":
        kill_self()
    if point == "accept":
        receiver._accept = lambda session: (accept(session), kill_self())
    if point == "commit":
        receiver._commit = lambda session, verified: kill_self()
    receiver.receive(session, Shelf(point, kill_self))


@pytest.mark.parametrize("point", ["open", "accept", "start", "t0", "t2", "t6", "finish", "commit"])
def test_a_killed_receiver_is_noticed_long_before_the_deadline(wire: Wire, point: str) -> None:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=receive_and_die, args=(wire, point, theirs), daemon=True)
    process.start()
    address, session = ours.recv()
    sender = wire.sender(address, SYNC.model_copy(update={"deadline_seconds": 120.0}))
    plan, values = model()
    started = time.monotonic()
    with pytest.raises(ReshardError, match=f"process {process.pid} ended|connection to tcp://.* closed"):
        send(sender, session, plan, values, 120.0)
    assert time.monotonic() - started < 60
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    sender.close()
    fresh = wire.receiver(30.0)
    again = wire.sender(fresh.address, SYNC)
    exchange(again, fresh, plan, values, 0)
    fresh.close()
    again.close()


def send_and_die(wire: Wire, point: str, address: str, session: Session) -> None:
    sender = wire.sender(address, SYNC)
    plan, values = model()
    kinds = {"manifest": 0, "bucket": 3, "end": 0, "commit": 0}
    post, seen = sender._dialer.send, []

    def die(message: Any) -> None:
        if message.kind == point and (seen.append(message) or len(seen) > kinds[point]):
            time.sleep(0.1)  # lets what was sent before arrive
            kill_self()
        post(message)

    sender._dialer.send = die
    if point == "confirmed":
        sender.commit = lambda: (post(Commit(session_id=session.session_id)), time.sleep(0.1), kill_self())
    send(sender, session, plan, values, 20.0)


@pytest.mark.parametrize("point", ["manifest", "bucket", "end", "commit"])
def test_a_killed_sender_is_noticed_and_the_receiver_serves_nothing(wire: Wire, point: str) -> None:
    receiver = wire.receiver(120.0)
    plan, values = model()
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    process = PROCESSES.Process(
        target=send_and_die, args=(wire, point, receiver.address, session), daemon=True
    )
    process.start()
    started = time.monotonic()
    with pytest.raises(ReshardError, match=f"process {process.pid} ended|process {process.pid} closed"):
        receiver.receive(session, shelf)
    assert time.monotonic() - started < 60 and shelf.aborts == (point != "manifest")
    process.join(10)
    assert process.exitcode == -signal.SIGKILL and receiver.progress.state is State.FAILED
    sender = wire.sender(receiver.address, SYNC)
    exchange(sender, receiver, plan, values, 0)
    receiver.close()
    sender.close()
    assert "memfd:mrl-segment" not in Path("/proc/self/maps").read_text()


def test_a_sender_killed_after_its_commit_changes_nothing(wire: Wire, receiver: Receiver) -> None:
    plan, _ = model()
    session, shelf = Session.new(-1, 0, plan.digest), Shelf()
    process = PROCESSES.Process(
        target=send_and_die, args=(wire, "confirmed", receiver.address, session), daemon=True
    )
    process.start()
    receiver.receive(session, shelf)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL and receiver.progress.serving and len(shelf.tensors) == 7
