"""The repository's folders and modules, for tests about all of them."""

import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = {"mrl": "mrl", "models": "mrl.models", "resharding": "mrl.resharding", "launch": "mrl.launch", "benchmarks": "benchmarks"}  # fmt: skip
"""Top-level folders and the package each is imported as."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module's file by the name that it is imported as."""
    named = {}
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            named[".".join((package, *inner)).removesuffix(".__init__")] = file
    return named
