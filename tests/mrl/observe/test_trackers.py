"""A tracker that fails or hangs is switched off with one warning; the others and training go on."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from mrl.errors import ConfigError
from mrl.observe import trackers
from mrl.observe.trackers import GuardedTracker


class Failing:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("server gone")

    def close(self) -> None: ...


class Hanging:
    def __init__(self) -> None:
        self.entered = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        threading.Event().wait(30)

    def close(self) -> None: ...


def test_a_failing_tracker_is_switched_off_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = GuardedTracker("failing", Failing, deadline_seconds=2)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(step, {"a": 1.0})
        tracker.close()
    assert not tracker.enabled
    assert [r.message for r in caplog.records if "switched off" in r.message] == [
        "tracker failing switched off: ConnectionError: server gone; training goes on, metrics.jsonl is complete"
    ]


def test_a_hanging_tracker_never_delays_a_step() -> None:
    hanging = Hanging()
    tracker = GuardedTracker("hanging", lambda: hanging, deadline_seconds=0.3)
    start = time.monotonic()
    tracker.log(0, {"a": 1.0})
    assert hanging.entered.wait(5)
    for step in range(1, 40):
        tracker.log(step, {"a": 1.0})
    assert not tracker.enabled
    tracker.close()
    assert time.monotonic() - start < 5


def test_an_absent_package_is_named_with_its_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mrl\[wandb\]"):
        trackers.start(("wandb",), tmp_path, first_step=0, run_name="r", deadline_seconds=1)


def test_tensorboard_shows_no_step_twice_after_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, last_step in ((0, 4), (2, 6)):
        (tracker,) = trackers.start(
            ("tensorboard",), tmp_path, first_step=first_step, run_name="r", deadline_seconds=60
        )
        for step in range(first_step, last_step):
            tracker.log(step, {"reward/mean": float(step)})
        tracker.close()
        assert tracker.enabled
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("reward/mean")] == [0, 1, 2, 3, 4, 5]
