"""`mrl sandboxes` on this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl.processes.start import module_command, wait_or_kill


class SandboxServer:
    """A server that runs, and its clients' options."""

    def __init__(self, folder: Path, *words: str) -> None:
        """Start it. `folder`: of its key and its log."""
        self.key_file, self.log = folder / "sandboxes.key", folder / "sandboxes.log"
        words = ("sandboxes", "--listen", "127.0.0.1:0", "--key-file", str(self.key_file), *words)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                module_command("mrl.cli", *words),
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        assert self.process.stdout is not None
        line = b""
        while not line.startswith(b"serving"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
        self.url = line.decode().split()[-1]

    @property
    def options(self) -> dict[str, Any]:
        """`sandbox.options` of its clients."""
        return {"url": self.url, "key_file": str(self.key_file)}

    def stop(self) -> int:
        """Stop it; return its exit status."""
        self.process.terminate()
        status = wait_or_kill(self.process, 60.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[SandboxServer]:
    """Run a server with these further arguments."""
    server = SandboxServer(folder, *words)
    try:
        yield server
    finally:
        server.stop()
