"""Report that starting workers' nodes still compile, so that the driver does not count it as silence.

With cold caches, engines compile for many minutes: FlashInfer's and DeepGEMM's kernels, torch's graphs,
Triton's kernels. One process of a node compiles a file, the others wait for its lock. A starting worker
writes to the log folder how many files its node has compiled since; while that changes, the driver's deadline
(launch.start_deadline_seconds) begins anew.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from mrl.compile_cache import EXTENSIONS, OF_OTHERS, VARIABLE, use_own_compile_cache

LOOK_SECONDS = 15.0
_ENDING = ".compiled"


@contextlib.contextmanager
def reporting(log_folder: str, name: str) -> Iterator[None]:
    """Report the files that this node compiles while the block runs, under a worker's name."""
    report, over = Path(log_folder) / f"{name}{_ENDING}", threading.Event()
    use_own_compile_cache()  # before the worker itself does, which sets the variables
    before = num_compiled(os.environ)

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            if num := num_compiled(os.environ) - before:
                with contextlib.suppress(OSError):  # a full disk ends no start
                    report.write_text(str(num))

    watcher = threading.Thread(target=look, name="compile-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        report.unlink(missing_ok=True)


def num_compiled(environment: Mapping[str, str]) -> int:
    """Return the number of files in the compile caches that these variables name."""
    folders = {Path(environment[name]) for name in (VARIABLE, EXTENSIONS, *OF_OTHERS) if name in environment}
    outer = [folder for folder in folders if not any(parent in folders for parent in folder.parents)]
    return sum(len(files) for folder in outer for _, _, files in os.walk(folder))


def reports(log_folder: Path) -> dict[str, str]:
    """Return what starting workers reported last, by file name."""
    texts = {}
    for path in log_folder.glob(f"*{_ENDING}"):
        with contextlib.suppress(OSError):
            texts[path.name] = path.read_text()
    return texts
