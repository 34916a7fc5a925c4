"""What the driver shows while it runs: a live line with rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.status import Status

SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "val/accuracy", ".3f"),
    ("entropy", "policy/entropy", ".3f"),
    ("mismatch", "policy/rollout_logprob_diff_max", ".1e"),
    ("grad", "optim/grad_norm", ".2f"),
)


class Progress:
    """One line a step with the figures people look for first, and the time left."""

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._start = time.monotonic()
        self._first_step: int | None = None
        self._live: Status | None = None

    def phase(self, step: int, name: str) -> None:
        """Shows what runs now; only on a terminal."""
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = self._console.status("")
            self._live.start()
        self._live.update(f"step {step}/{self._num_steps}: {name}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._first_step = step if self._first_step is None else self._first_step
        figures = [f"{label} {metrics[name]:{form}}" for label, name, form in SHOWN if name in metrics]
        seconds = metrics.get("time/step_seconds", 0.0)
        done = step - self._first_step + 1
        left = (time.monotonic() - self._start) / done * max(0, self._num_steps - step)
        self.message(
            f"step {step}/{self._num_steps}  {'  '.join(figures)}  {seconds:.1f} s  ({left / 60:.0f} min left)"
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
