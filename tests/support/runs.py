"""Run programs to their end, and wait for conditions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tests.support.source_tree import ROOT


def run_python(
    *words: str, seconds: float = 240.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in the repository; return its output and its code, whatever that is."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def until(condition: Callable[[], object], *, seconds: float = 120.0, every: float = 0.05) -> None:
    """Wait for a condition; AssertionError if it does not hold in time.

    Looks are counted, not seconds: a machine that stands still for a while costs one look, however late its
    clock then is.
    """
    for _ in range(math.ceil(seconds / every)):
        if condition():
            return
        time.sleep(every)
    raise AssertionError(f"not so within {seconds:g} s")
