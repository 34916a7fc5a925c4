"""The libraries that vLLM's CPU platform has its workers preload, by paths that ld.so reads.

ld.so takes a space in LD_PRELOAD for the end of a name, so that in an environment under a path with one every process that vLLM starts
says twice that something cannot be preloaded, and nothing is. vLLM adds no library whose name is in the list.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = {
    "libgomp": (("torch", "../torch.libs"), ("torch", "lib")),
    "libtcmalloc": (("vllm", "libs"),),
}
"""Where vLLM looks for each: in a folder beside or in a package."""


def preload_by_short_paths() -> None:
    """Name the libraries by an open folder of this process where their own paths have a space; before vLLM makes its configuration."""
    before = os.environ.get("LD_PRELOAD", "")
    added = [_short(file) for name, file in _libraries() if name not in before and " " in str(file)]
    if added:
        os.environ["LD_PRELOAD"] = ":".join([*added, *([before] if before else [])])


def _libraries() -> Iterator[tuple[str, Path]]:
    for name, folders in _FOLDERS.items():
        found = (
            file
            for package, folder in folders
            for file in sorted((_package(package) / folder).glob(f"{name}*.so*"))
        )
        if (first := next(found, None)) is not None:
            yield name, first


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(str(spec and spec.origin)).parent


def _short(file: Path) -> str:
    """The folder stays open as long as this process lives, and its children are its own user's."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{folder}/{file.name}"
