"""TensorBoard and Weights & Biases behind one protocol, each in its own thread.

A tracker that raises or falls behind is switched off with one warning; it never stops or delays training. All
follow metrics.jsonl: at a start, each takes the rows it lacks from there.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mrl.config.flat import flat
from mrl.config.sections.logging import LoggingSection
from mrl.errors import ConfigError
from mrl.observe.run_folder import TrackedRun
from mrl.observe.samples_log import Row, samples_table
from mrl.observe.wandb_tracker import WandbTracker

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 10.0
"""Longest wait for a tracker at the end of a run."""


class Tracker(Protocol):
    """Destination of metrics besides metrics.jsonl."""

    next_step: int
    """First step that the tracker does not have yet."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Take some rows of samples.jsonl, of one step and kind, before the step's metrics."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run folder; steps from the last saved one on are hidden and written again.

    The last saved one is included because its row may have been lost with the run that saved it.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.next_step = max(0, run.first_step - 1) if folder.is_dir() else 0
        self._writer = SummaryWriter(str(folder), purge_step=self.next_step)
        settings = [f"    {name}: {text}" for name, text in flat(run.config)]
        self._writer.add_text("config", "\n".join(settings), max(0, run.first_step - 1))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Write rows as text; indented lines keep the Markdown page from formatting them."""
        columns, values = samples_table(rows)
        lines = [
            line
            for row in values
            for name, value in zip(columns, row, strict=True)
            for line in f"{name}: {value}".splitlines()
        ]
        self._writer.add_text(f"samples/{rows[0]['kind']}", "\n".join(f"    {line}" for line in lines), step)

    def close(self) -> None:
        self._writer.close()


class GuardedTracker:
    """Tracker in a daemon thread with a bounded queue; failure or delay switches it off."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        deadline_seconds: float,
        history: Iterable[Mapping[str, float]] = (),
    ) -> None:
        """Start the thread; the tracker first takes its missing rows from `history` (metrics.jsonl)."""
        self.name, self.enabled = name, True
        self._deadline_seconds = deadline_seconds
        self._queue: queue.Queue[tuple[int, dict[str, float] | Sequence[Row]] | None] = queue.Queue(
            maxsize=32
        )
        self._thread = threading.Thread(
            target=self._work, args=(make, history), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(step, dict(metrics))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Queue rows of samples.jsonl of one step and kind, if there are any."""
        if rows:
            self._put(step, rows)

    def _put(self, step: int, entry: dict[str, float] | Sequence[Row]) -> None:
        if not self.enabled:
            return
        try:
            self._queue.put_nowait((step, entry))
        except queue.Full:
            self._switch_off(f"{self._queue.maxsize} rows and tables behind")

    def close(self) -> None:
        """Wait at most the deadline for queued items."""
        if self.enabled:
            try:
                self._queue.put(None, timeout=self._deadline_seconds)
            except queue.Full:
                self._switch_off("its queue did not empty at the end")
        self._thread.join(self._deadline_seconds)
        if self._thread.is_alive():
            self._switch_off(f"still busy {self._deadline_seconds:g} s after the end")

    def _work(self, make: Callable[[], Tracker], history: Iterable[Mapping[str, float]]) -> None:
        try:
            tracker = make()
            for row in history:
                self._pass_on(tracker, int(row["step"]), {n: float(v) for n, v in row.items() if n != "step"})
            while self.enabled and (item := self._queue.get()) is not None:
                self._pass_on(tracker, *item)
            if self.enabled:
                tracker.close()
        except Exception as error:  # whatever a tracker raises must not reach training
            self._switch_off(f"{type(error).__name__}: {error}")

    def _pass_on(self, tracker: Tracker, step: int, entry: dict[str, float] | Sequence[Row]) -> None:
        if not self.enabled or step < tracker.next_step:
            return
        if isinstance(entry, dict):
            tracker.log(step, entry)
            tracker.next_step = step + 1
        else:
            tracker.samples(step, entry)

    def _switch_off(self, reason: str) -> None:
        if self.enabled:
            self.enabled = False
            log.warning(
                "tracker %s switched off: %s; training continues, metrics.jsonl is complete",
                self.name,
                reason,
            )


def require_installed(names: Iterable[str]) -> None:
    """Raise ConfigError that names the extra of each tracker whose package is missing; imports nothing.

    A folder that a tracker left in the working folder (wandb/) looks like a package without a file.
    """
    specs = {name: importlib.util.find_spec(name) for name in names}
    if absent := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise ConfigError(
            f"logging.trackers names {', '.join(absent)}, which is not installed; install the extra: "
            f"pip install 'mrl[{','.join(absent)}]', or leave it out of logging.trackers"
        )


def start_trackers(
    section: LoggingSection, run: TrackedRun, *, history: Iterable[Mapping[str, float]]
) -> list[GuardedTracker]:
    """Return a guarded tracker for each name; raise ConfigError if a package is missing."""
    require_installed(section.trackers)
    kinds: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run),
        "wandb": lambda: WandbTracker(run, section.wandb_project, deadline_seconds=DEADLINE_SECONDS),
    }
    return [
        GuardedTracker(name, kinds[name], deadline_seconds=DEADLINE_SECONDS, history=history)
        for name in section.trackers
    ]
