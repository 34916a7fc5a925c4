"""What vLLM's tensor-parallel workers leave behind when their owner is killed, and who removes it.

vLLM gives its message queues and its CPU all-reduce named shared memory and rendezvous through a file. It removes them at
an orderly end only. A tiny shell of its own session holds a pipe from the owner: when the owner ends, however it
ends, the pipe closes and the shell removes exactly those names.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

_SEGMENT = re.compile(r"/dev/shm/(?:psm_\w+|vllm_dist_\S+)")
_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]+")


def names_of_workers() -> list[Path]:
    """Named segments that this process and its descendants have mapped, and the workers' rendezvous file."""
    segments: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(OSError):
            segments |= set(_SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    rendezvous = {found[0] for segment in segments if (found := _RENDEZVOUS.search(segment))}
    folder = Path(tempfile.gettempdir())
    return sorted(Path(s) for s in segments) + sorted(folder / name for name in rendezvous)


class Remover:
    """Removes the named files as soon as this process has ended or called `close`."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; sleep 1; rm -f -- "$@"', "mrl-remover", *map(str, self.paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self, seconds: float = 10.0) -> None:
        """Returns when the names are gone."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(seconds)
