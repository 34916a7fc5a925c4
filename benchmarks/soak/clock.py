"""A wall clock that a run's processes read and a soak moves (clock.c); the machine's clock is unchanged."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """A command's clock: its environment variables and how far it is moved."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into `folder`; without a compiler the clock cannot be moved."""
        self._file, library = folder / "clock-seconds", folder / "clock.so"
        compiler = shutil.which("cc")
        self.can_jump = compiler is not None
        self.environment: dict[str, str] = {}
        self._seconds = 0
        self._write()
        if compiler is not None:
            words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
            subprocess.run(words, timeout=60, check=True)
            self.environment = {"LD_PRELOAD": str(library), "MRL_SOAK_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Move the clock further by `seconds`, back if negative."""
        self._seconds += seconds
        self._write()

    def _write(self) -> None:
        mode = "r+b" if self._file.exists() else "wb"  # processes have mapped this very file
        with self._file.open(mode) as file:
            file.write(struct.pack("=q", self._seconds))
