"""The table that the GPU smoke test prints: a line for each check, with the figure that was measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mrl.resharding.wire import memory


def median_seconds(device: torch.device, action: Callable[[], object], *, repeats: int = 7) -> float:
    """Of the whole action, the device waited for; after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.monotonic()
        action()
        memory.synchronize(device)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


class Report:
    """Prints each check as it is made, and remembers whether one failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, passed: bool, name: str, figure: str = "") -> None:
        """A claim that holds or fails, and the figure behind it."""
        if not passed:
            self.failed.append(name)
        self._print("ok" if passed else "FAIL", name, figure)

    def figure(self, name: str, figure: str) -> None:
        """A measured figure that nothing is claimed of."""
        self._print("", name, figure)

    def error(self, name: str, error: Exception) -> None:
        """A stage that ended by an exception."""
        self.failed.append(name)
        self._print("FAIL", name, f"{type(error).__name__}: {error}")

    @staticmethod
    def _print(verdict: str, name: str, figure: str) -> None:
        print(f"{verdict:4}  {name:62} {figure}".rstrip(), flush=True)
