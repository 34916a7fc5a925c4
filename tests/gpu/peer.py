"""A second process of the tests of one device: it does with a trainer's memory what an engine's worker does.

Needs neither vLLM nor Ray. Talks over a pipe: gets a job, answers with its result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.resharding.storage import Storage, Windows
from mrl.resharding.transfer.lease import Lease, describe_device, describe_files
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.wire.digest import digest_bytes
from mrl.training.platform.parameter_memory import ParameterMemory

DEADLINE_SECONDS = 60.0


class Peer:
    """A process on the same device; `address` is where a sender connects."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        self.address: str = self.answer()

    def ask(self, job: str, *arguments: Any) -> None:
        self._pipe.send((job, arguments))

    def answer(self) -> Any:
        """The result of the last job; RuntimeError with the peer's error, or when it stays silent."""
        if not self._pipe.poll(2 * DEADLINE_SECONDS):
            raise RuntimeError(f"the peer did not answer within {2 * DEADLINE_SECONDS:g} s")
        value = self._pipe.recv()
        if isinstance(value, Exception):
            raise RuntimeError(f"the peer failed: {value!r}") from value
        return value

    def free_bytes(self) -> int:
        """What is free on the device, as that process is told."""
        self.ask("free")
        return self.answer()

    @contextlib.contextmanager
    def leased(self, memory: ParameterMemory, device: torch.device) -> Iterator[list[int]]:
        """Inside, that process holds the memory under a lease; yields the digests it read."""
        memory.lease()
        buffers = [flat_bytes(buffer.param_data) for buffer in memory.buffers]
        lent = describe_device(buffers) if device.type == "cuda" else describe_files(memory.export())
        self.ask("lease", lent)
        yield self.answer()
        self.ask("unmap")
        self.answer()
        memory.release()

    def close(self) -> None:
        self._pipe.send(("close", ()))
        self._process.join(DEADLINE_SECONDS)
        if self._process.is_alive():
            self._process.kill()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as [n] uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _serve(pipe: Connection, device: str) -> None:
    receiver = Receiver(deadline_seconds=DEADLINE_SECONDS, device=torch.device(device))
    lease: Lease | None = None

    def work(job: str, arguments: tuple[Any, ...]) -> Any:
        nonlocal lease
        if job == "receive":
            session, manifest = arguments
            storage = Storage(manifest, torch.device(device))
            receiver.receive(session, Windows(storage))
            return {name: digest_bytes(flat_bytes(flat)) for name, flat in storage.flat.items()}
        if job == "free":
            return torch.cuda.mem_get_info()[0]
        if job == "release":
            return receiver.release()
        if job == "lease":
            lease = Lease(arguments[0])
            return [digest_bytes(buffer) for buffer in lease.buffers]
        assert job == "unmap" and lease is not None, f"unknown job {job}"
        return lease.close()

    pipe.send(receiver.address)
    while (request := pipe.recv())[0] != "close":
        try:
            pipe.send(work(*request))
        except Exception as error:  # told to the asking process, which ends with it
            pipe.send(error)
    receiver.close()
