"""Print one line per step: the most important metrics and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "val/accuracy", ".3f"),
    ("validation", "val/reward", ".3f"),
    ("entropy", "policy/entropy", ".3f"),
    ("mismatch", "policy/rollout_logprob_diff_max", ".1e"),
    ("grad", "optim/grad_norm", ".2f"),
)


class ProgressPrinter:
    """Printer of one run's lines."""

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._start = time.monotonic()
        self._first_step: int | None = None

    def message(self, text: str) -> None:
        """Print a line at once."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step."""
        self._first_step = step if self._first_step is None else self._first_step
        shown = metrics.keys() - ({"val/reward"} if "val/accuracy" in metrics else set())  # the same number
        figures = [f"{label} {metrics[name]:{form}}" for label, name, form in COLUMNS if name in shown]
        seconds = metrics.get("time/step_seconds", 0.0)
        done = step - self._first_step + 1
        left = (time.monotonic() - self._start) / done * max(0, self._num_steps - step)
        self.message(
            f"step {step}/{self._num_steps}  {'  '.join(figures)}  {seconds:.1f} s  ({left / 60:.0f} min "
            "left)"
        )
