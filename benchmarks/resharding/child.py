"""An object in its own process, like an engine's worker: calls go over a pipe, errors come back."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch

from mrl.errors import WeightSyncError


class Child:
    """A process with an object; `call` is `start` and `result`. It ends with `close` or its parent."""

    def __init__(self, factory: Callable[..., Any], *arguments: Any, seconds: float) -> None:
        """`factory(*arguments)` makes the object in the process; `seconds` is the deadline of every call."""
        context = multiprocessing.get_context("spawn")
        self._seconds = seconds
        self._pipe, theirs = context.Pipe()
        # A daemon may not have workers, but an engine has.
        self._process = context.Process(
            target=_serve, args=(theirs, torch.get_num_threads(), factory, arguments)
        )
        self._process.start()
        theirs.close()
        self.result()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """Return the started call's result; raise WeightSyncError if it raised, ended or is late."""
        try:
            if not self._pipe.poll(self._seconds):
                raise WeightSyncError(f"process {self.pid} did not answer within {self._seconds:.0f} s")
            value, error = self._pipe.recv()
        except EOFError as gone:
            raise WeightSyncError(f"process {self.pid} ended without an answer") from gone
        if error:
            raise WeightSyncError(f"process {self.pid}:\n{error}")
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.result()

    def close(self) -> None:
        """Ask the process to end; kill it after 20 s."""
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any, num_threads: int, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(num_threads)
    target: Any = None
    call: tuple[str, tuple[Any, ...]] | None = None
    while True:
        try:
            if call is None:
                target, value = factory(*arguments), None
            else:
                value = getattr(target, call[0])(*call[1])
            pipe.send((value, ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        try:
            call = pipe.recv()
        except EOFError:  # closed, or the parent is gone
            break
    if target is not None:
        target.close()
