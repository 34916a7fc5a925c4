"""A stand-in for off-loading's torch.cuda calls: records each by name, in order, without a GPU.

Tensors are on the CPU or on "meta" (bytes without contents). The device under test is "meta", because it is
not "cpu" and needs no driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DEVICE = torch.device("meta")


class Stream:
    """A recorded stream; queued work runs at once."""

    def __init__(self, recorder: RecordedCuda, name: str) -> None:
        self._recorder, self._name = recorder, name

    def wait_stream(self, other: Stream) -> None:
        self._recorder.note(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._recorder.note(f"synchronize {self._name}")


class RecordedCuda:
    """Records calls of torch.cuda in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        """Address -> bytes of the host memory that is pinned now."""
        self._current = Stream(self, "current")

    def note(self, call: str) -> None:
        self.calls.append(call)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_ins: dict[str, Any] = {
            "Stream": lambda device=None: Stream(self, "side"),
            "current_stream": lambda device=None: self._current,
            "stream": self._on_stream,
            "synchronize": lambda device=None: self.note("synchronize device"),
            "ipc_collect": lambda: self.note("ipc_collect"),
            "empty_cache": lambda: self.note("empty_cache"),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._release
            ),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextlib.contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        self.note(f"on {stream._name}")
        yield
        self.note(f"off {stream._name}")

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        """Refuse partly registered memory, as the driver does (cudaErrorHostMemoryAlreadyRegistered)."""
        self.note("pin")
        if any(
            address < first + size and first < address + num_bytes for first, size in self.registered.items()
        ):
            return 712
        self.registered[address] = num_bytes
        return 0

    def _release(self, address: int) -> int:
        self.note("unpin")
        del self.registered[address]
        return 0
