"""The repository's folders and modules, for tests that cover all of them."""

import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "mrl": "mrl", "models": "mrl.models", "resharding": "mrl.resharding", "launch": "mrl.launch",
    "benchmarks": "benchmarks",
}  # fmt: skip
"""Top-level folder -> import name."""


@functools.cache
def modules() -> dict[str, Path]:
    """Map each module's import name to its file."""
    named = {}
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            named[".".join((package, *inner)).removesuffix(".__init__")] = file
    return named
