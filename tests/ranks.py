"""Runs a function on n gloo processes; at a deadline or failure kills all and reports the first traceback."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.forking import process_kind

IMPORTS = ("tests.mrl.training.scenarios", "tests.resharding.test_planned")
Rank = process_kind(*IMPORTS)
"""A process that starts with a rank's imports."""


def free_port() -> int:
    """Return a free TCP port below the range that the system assigns to connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # no seed that a neighbour has too
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float = 540.0,
    stand_ins: Path | None = None,
) -> list[Any]:
    """Return [function(rank, world_size, port, *args) of each rank]; the function must be a module's.

    `stand_ins`: a folder with stand-ins for packages, from which the ranks import first.
    Raises AssertionError with the first traceback, or with the ranks still running at the deadline.
    """
    kind = Rank if stand_ins is None else process_kind(*IMPORTS, ahead=stand_ins)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            kind(target=_enter, args=(function, rank, world_size, port, args, folder), daemon=True)
            for rank in range(world_size)
        ]
        with _path_begins_with(stand_ins):
            for process in ranks:
                process.start()
        try:
            _wait(ranks, folder, seconds, function)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(world_size)]


@contextlib.contextmanager
def _path_begins_with(folder: Path | None) -> Iterator[None]:
    """New processes copy sys.path."""
    usual = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = usual


def _wait(ranks: list[Any], folder: str, seconds: float, function: Callable[..., Any]) -> None:
    deadline = time.monotonic() + seconds
    running = list(ranks)
    while running:
        wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
        ended = [process for process in running if process.exitcode is not None]
        running = [process for process in running if process not in ended]
        if any(process.exitcode != 0 for process in ended):
            time.sleep(0.2)  # a peer's later error is only an echo; the first one may still be being written
            raise AssertionError(_first_failure(folder, ended))
        if running and time.monotonic() >= deadline:
            late = [number for number, process in enumerate(ranks) if process.is_alive()]
            raise AssertionError(f"{function.__name__}: ranks {late} still running after {seconds:.0f} s")


def _first_failure(folder: str, ended: list[Any]) -> str:
    failures = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        return f"rank {failures[0].stem} failed first:\n{failures[0].read_text()}"
    return f"a rank ended without a traceback, exit codes {[process.exitcode for process in ended]}"


def _enter(
    function: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], folder: str
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        result = function(rank, world_size, port, *args)
        Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
    except BaseException:
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(traceback.format_exc())
        partial.rename(Path(folder, f"{rank}.error"))
        os._exit(1)
    os._exit(0)
