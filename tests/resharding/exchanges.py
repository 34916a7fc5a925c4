"""A trainer rank and a receiver for the contract tests: a consumer that fails where it is told to, whole sessions, a death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.transfer import gather, gather_plan
from mrl.resharding.transfer.gather_plan import GatherPlan
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.run_session import SendStats
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session, WireTensor

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
    assert thread.end() is None and stats.moved.num_bytes == plan.num_bytes
    assert receiver.progress.serving and receiver.progress.version == version
    assert [shelf.tensors[t.name].tolist() for t in plan.tensors] == [v.tolist() for v in values]
    return shelf


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
