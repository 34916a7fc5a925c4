"""TensorBoard, Weights & Biases and MLflow behind one protocol, each in a thread of its own.

A tracker that raises or falls behind is switched off with one warning; it never stops or delays training. All
follow metrics.jsonl: at a start each takes the rows it lacks from there.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mrl.config.sections.logging import LoggingSection
from mrl.errors import ConfigError
from mrl.observe.mlflow_tracker import MlflowTracker
from mrl.observe.run_folder import TrackedRun
from mrl.observe.wandb_tracker import WandbTracker

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go beside metrics.jsonl."""

    next_step: int
    """Rows of earlier steps are there already."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run folder, whose steps from the last saved one on are hidden and written again.

    That one too: its row may have been lost with the run that saved it.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.next_step = max(0, run.first_step - 1) if folder.is_dir() else 0
        self._writer = SummaryWriter(str(folder), purge_step=self.next_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class GuardedTracker:
    """Runs a tracker in a daemon thread with a bounded queue; failure or delay switches it off."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        deadline_seconds: float,
        history: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """`history` are the rows of metrics.jsonl: the tracker takes those it lacks before anything new."""
        self.name, self.enabled = name, True
        self._deadline_seconds = deadline_seconds
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(maxsize=16)
        self._thread = threading.Thread(
            target=self._work, args=(make, history), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.enabled:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._switch_off(f"{self._queue.maxsize} steps behind")

    def close(self) -> None:
        """Waits at most the deadline for what is queued."""
        if self.enabled:
            try:
                self._queue.put(None, timeout=self._deadline_seconds)
            except queue.Full:
                self._switch_off("its queue did not empty at the end")
        self._thread.join(self._deadline_seconds)
        if self._thread.is_alive():
            self._switch_off(f"still busy {self._deadline_seconds:g} s after the end")

    def _work(self, make: Callable[[], Tracker], history: Sequence[Mapping[str, float]]) -> None:
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

    def _pass_on(self, tracker: Tracker, step: int, metrics: Mapping[str, float]) -> None:
        if self.enabled and step >= tracker.next_step:
            tracker.log(step, metrics)
            tracker.next_step = step + 1

    def _switch_off(self, reason: str) -> None:
        if self.enabled:
            self.enabled = False
            log.warning(
                "tracker %s switched off: %s; training goes on, metrics.jsonl is complete", self.name, reason
            )


def require_installed(names: Iterable[str]) -> None:
    """ConfigError that names the extra of each tracker whose package is absent; imports nothing.

    A folder that a tracker left in the working folder (wandb/) looks like a package without a file.
    """
    specs = {name: importlib.util.find_spec(name) for name in names}
    if absent := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise ConfigError(
            f"logging.trackers names {', '.join(absent)}, which is not installed; install the extra: "
            f"pip install 'mrl[{','.join(absent)}]', or leave it out of logging.trackers"
        )


def start(
    section: LoggingSection, run: TrackedRun, *, history: Sequence[Mapping[str, float]]
) -> list[GuardedTracker]:
    """A guarded tracker for each name; ConfigError where a package is absent."""
    require_installed(section.trackers)
    deadline = section.tracker_deadline_seconds
    kinds: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run),
        "wandb": lambda: WandbTracker(run, section.wandb, deadline_seconds=deadline),
        "mlflow": lambda: MlflowTracker(run, section.mlflow),
    }
    return [
        GuardedTracker(name, kinds[name], deadline_seconds=deadline, history=history)
        for name in section.trackers
    ]
