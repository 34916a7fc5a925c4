"""Preload vLLM's CPU libraries in its workers by paths that ld.so can read.

ld.so ends a name in LD_PRELOAD at a space. So in an environment under a path with a space, every process of
vLLM prints twice that it cannot preload something, and preloads nothing. vLLM adds no library whose name is
already in the list.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = {"libgomp": (("torch", "../torch.libs"), ("torch", "lib")), "libtcmalloc": (("vllm", "libs"),)}
"""Folders in or beside packages where vLLM looks for each library."""


def preload_by_short_paths() -> None:
    """Replace library paths with a space by an open folder of this process; call before vLLM's config."""
    before = os.environ.get("LD_PRELOAD", "")
    added = [_short(file) for name, file in _libraries() if name not in before and " " in str(file)]
    if added:
        os.environ["LD_PRELOAD"] = ":".join([*added, *([before] if before else [])])


def _libraries() -> Iterator[tuple[str, Path]]:
    for name, folders in _FOLDERS.items():
        files = (
            file
            for package, folder in folders
            for file in sorted((_package(package) / folder).glob(f"{name}*.so*"))
        )
        if (first := next(files, None)) is not None:
            yield name, first


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(str(spec and spec.origin)).parent


def _short(file: Path) -> str:
    """Return the file's path in a folder kept open; children, of the same user, can read it."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{folder}/{file.name}"
