"""The figures that tests of one device print, each beside the claim that it stands for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mrl.resharding.wire import memory


def median_seconds(device: torch.device, action: Callable[[], object], *, repeats: int = 7) -> float:
    """Return the seconds that the action takes, the device waited for; a first time is not counted."""
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
    """Print a measured figure that nothing is claimed of."""
    print(f"{name:62} {figure}".rstrip(), flush=True)
