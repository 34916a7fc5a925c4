"""TensorBoard, Weights & Biases and MLflow behind one protocol, each in a thread of its own.

A tracker that raises or exceeds its deadline is switched off with one warning; it never stops or delays training.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from mrl.errors import ConfigError

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go beside metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run folder; `purge_step` hides steps of an earlier attempt."""

    def __init__(self, folder: Path, *, first_step: int, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One run whose id is kept in the run folder, so that a resumed run continues it."""

    def __init__(self, folder: Path, *, first_step: int, run_name: str) -> None:
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.is_file():
            id_file.write_text(wandb.util.generate_id())
        self._run = wandb.init(id=id_file.read_text(), resume="allow", name=run_name, dir=str(folder))
        self._first_step = first_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """One MLflow run whose id is kept in the run folder."""

    def __init__(self, folder: Path, *, first_step: int, run_name: str) -> None:
        import mlflow

        id_file = folder / "mlflow_id"
        run_id = id_file.read_text() if id_file.is_file() else None
        run = mlflow.start_run(run_id=run_id, run_name=None if run_id else run_name)
        id_file.write_text(run.info.run_id)
        self._mlflow = mlflow

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


KINDS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


class GuardedTracker:
    """Runs a tracker in a daemon thread with a bounded queue; failure or delay switches it off."""

    def __init__(self, name: str, make: Callable[[], Tracker], *, deadline_seconds: float) -> None:
        self.name, self.enabled = name, True
        self._deadline_seconds = deadline_seconds
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(maxsize=16)
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker-{name}", daemon=True)
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

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (item := self._queue.get()) is not None:
                if not self.enabled:
                    return
                tracker.log(*item)
            tracker.close()
        except Exception as error:  # whatever a tracker raises must not reach training
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        if self.enabled:
            self.enabled = False
            log.warning(
                "tracker %s switched off: %s; training goes on, metrics.jsonl is complete", self.name, reason
            )


def start(
    names: tuple[str, ...], folder: Path, *, first_step: int, run_name: str, deadline_seconds: float
) -> list[GuardedTracker]:
    """A guarded tracker for each name; an absent package is named with its extra before the run starts."""
    import importlib.util

    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"observe.trackers names {name}, which is not installed; install the extra: pip install 'mrl[{name}]'"
            )
    return [
        GuardedTracker(
            name,
            lambda kind=KINDS[name]: kind(folder, first_step=first_step, run_name=run_name),
            deadline_seconds=deadline_seconds,
        )
        for name in names
    ]
