"""Test processes that start with imports: one fork server per kind, without the parent's threads."""

from __future__ import annotations

import functools
import multiprocessing
import os
from multiprocessing import forkserver, popen_forkserver
from pathlib import Path
from typing import Any
from unittest import mock

_ForkServerProcess: Any = multiprocessing.get_context("forkserver").Process


@functools.cache
def process_kind(*modules: str, ahead: Path | None = None) -> Any:
    """Return multiprocessing's Process with these modules imported. `ahead`: folder to import from first."""
    server = _Server(ahead)
    server.set_forkserver_preload(list(modules))

    class Popen(popen_forkserver.Popen):
        def _launch(self, process_obj: Any) -> None:
            usual, start = popen_forkserver.forkserver, server.connect_to_new_process
            with mock.patch.object(usual, "connect_to_new_process", start):
                super()._launch(process_obj)

    class Process(_ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Popen:
            return Popen(process_obj)

        def __reduce__(self) -> Any:
            """Pickle as a plain Process, which it is in its own process."""
            return _plain, (self.__dict__,)

    return Process


def _plain(fields: dict[str, Any]) -> Any:
    process = _ForkServerProcess.__new__(_ForkServerProcess)
    process.__dict__.update(fields)
    return process


class _Server(forkserver.ForkServer):
    def __init__(self, ahead: Path | None) -> None:
        super().__init__()
        self._ahead = ahead

    def ensure_running(self) -> None:
        paths = [str(self._ahead)] if self._ahead is not None else []
        paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}):
            super().ensure_running()
