"""A real RolloutEngine in a separate process that tests call; killed with its children at the end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mrl.config.sections.rollout import RolloutSection
from tests.forking import process_kind
from tests.forks import vllm_workers

ENGINE_SHAPE: dict[str, int] = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64}
"""Settings of a tiny model on vLLM's CPU kernels, at tp 1 and 2."""


class EngineHost:
    """`call(function, *args)` runs a module-level function(engine, *args) in the engine's process.

    With a `secret` the engine has its own thread, which also runs calls, and serves a driver at `address`."""

    def __init__(self, *, seconds: float = 540.0, secret: bytes = b"", **engine_arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        rollout = engine_arguments["rollout"]
        eager = (rollout.enforce_eager or rollout.ranks > 1) and rollout.num_threads == 1
        kind = process_kind("tests.engine_imports") if eager else context.Process
        self._pipe, theirs = context.Pipe()
        self.process = kind(target=_serve, args=(theirs, secret, engine_arguments))
        self.process.start()
        theirs.close()
        self.start_seconds: float
        self.address: tuple[str, int] | None
        self.start_seconds, self.address = self.result(seconds)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a call; `result` returns its outcome."""
        self._pipe.send((function, arguments))

    def result(self, seconds: float = 240.0) -> Any:
        if not self._pipe.poll(seconds):
            self.kill()
            raise AssertionError(f"the engine's process did not answer within {seconds:.0f} s and was killed")
        value, error, text = self._pipe.recv()
        if error is not None:
            raise error from AssertionError(text)
        return value

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = 240.0) -> Any:
        self.start(function, *arguments)
        return self.result(seconds)

    def kill(self) -> list[psutil.Process]:
        """Kill only the engine's process; return its former descendants."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.join(10)
        return family

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(30)
        family = self.kill() if self.process.is_alive() else []
        for process in family:
            process.kill()


def host_of(folder: Path, *, engine: dict[str, Any] | None = None, **rollout: Any) -> EngineHost:
    """Start a small engine of a folder; `engine`: RolloutEngine's arguments, `rollout`: its section."""
    usual = {"dtype": "float32", "enforce_eager": True, "kv_cache_bytes": 64 << 20, "max_num_seqs": 64}
    section = RolloutSection(**usual | rollout)
    return EngineHost(rollout=section, model_path=str(folder), max_length=160, seed=1, **engine or {})


def _serve(pipe: Any, secret: bytes, engine_arguments: dict[str, Any]) -> None:
    if engine_arguments["rollout"].tp > 1 and "vllm" in sys.modules:
        vllm_workers.stand_by()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    gc.disable()  # a fifth of the time that imports take
    try:
        host = (_Served if secret else _Bare)(secret, engine_arguments)
    except BaseException as error:
        pipe.send((None, error, traceback.format_exc()))
        return
    gc.enable()
    call: Any = (lambda engine: (engine.start_seconds, host.address), ())
    while call is not None:
        function, arguments = call
        try:
            pipe.send((host.run(function, *arguments), None, ""))
        except Exception as error:
            pipe.send((None, error, traceback.format_exc()))
        call = pipe.recv()
    host.close()


class _Bare:
    """The engine in the process's first thread."""

    address: tuple[str, int] | None = None

    def __init__(self, secret: bytes, engine_arguments: dict[str, Any]) -> None:
        from mrl.rollout.engine import RolloutEngine

        self.engine = RolloutEngine(**engine_arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.engine, *arguments)

    def close(self) -> None:
        self.engine.close()


class _Served:
    """The engine in its own thread, as in mrl/launch/workers/rollout_actor.py."""

    def __init__(self, secret: bytes, engine_arguments: dict[str, Any]) -> None:
        from mrl.rollout.engine import RolloutEngine
        from mrl.rollout.engine_loop import EngineLoop
        from mrl.rollout.engine_server import EngineServer

        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        server = EngineServer(listener, secret, spelled)
        self._loop = EngineLoop(lambda: RolloutEngine(**engine_arguments), server)
        self._loop.start()
        self._loop.ready.result()
        server.serve(self._loop)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._loop.call(lambda engine: function(engine, *arguments)).result()

    def close(self) -> None:
        self._loop.close()


def spelled(rows: Sequence[np.ndarray]) -> list[str]:
    """Return tokens [T] as text: their numbers."""
    return [" ".join(map(str, row.tolist())) for row in rows]


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
