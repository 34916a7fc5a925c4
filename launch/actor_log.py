"""Each worker process writes what it prints into a file of its own in the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path


def redirect(folder: str, name: str) -> None:
    """Sends stdout, stderr and log records of this process to folder/name.log (appending)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
