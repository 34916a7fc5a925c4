"""Figures that the tests of one device print, each with its claim."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mrl.resharding.wire import memory


def median_seconds(device: torch.device, action: Callable[[], object], *, repeats: int = 7) -> float:
    """Return the median seconds of an action, with a wait for the device; the first run is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.monotonic()
        action()
        memory.synchronize(device)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


def check(passed: bool, name: str, figure: str = "") -> None:
    """Print the figure behind a claim, and fail if the claim does not hold."""
    show(name, figure)
    assert passed, f"{name} {figure}"


def show(name: str, figure: str) -> None:
    print(f"{name:62} {figure}".rstrip(), flush=True)
