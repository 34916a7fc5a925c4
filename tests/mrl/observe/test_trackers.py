"""A tracker that fails or hangs is switched off with one warning; other trackers and training continue."""

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mrl.config.sections.logging import LoggingSection
from mrl.errors import ConfigError
from mrl.observe import trackers
from mrl.observe.run_folder import TrackedRun
from mrl.observe.samples_log import COLUMNS, Row
from mrl.observe.trackers import GuardedTracker
from mrl.observe.wandb_tracker import LAST_STEP, after_synced
from tests.support.run_folders import sample_row


class Failing:
    next_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("server gone")

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        raise ConnectionError("server gone")

    def close(self) -> None: ...


class Hanging:
    next_step = 0

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        self.released.wait()

    def samples(self, step: int, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


def test_a_failing_tracker_is_switched_off_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = GuardedTracker("failing", Failing, deadline_seconds=60)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(step, {"a": 1.0})
        tracker.close()
    assert not tracker.enabled
    assert [r.message for r in caplog.records if "switched off" in r.message] == [
        "tracker failing switched off: ConnectionError: server gone; "
        "training continues, metrics.jsonl is complete"
    ]


def test_a_hanging_tracker_never_delays_a_step() -> None:
    """The tracker hangs until the test ends: a step or a run's end that waited for it would hang too."""
    hanging = Hanging()
    tracker = GuardedTracker("hanging", lambda: hanging, deadline_seconds=0.3)
    tracker.log(0, {"a": 1.0})
    assert hanging.entered.wait(60)
    for step in range(1, 40):
        tracker.log(step, {"a": 1.0})
    assert not tracker.enabled
    tracker.close()
    hanging.released.set()


def test_an_absent_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"mrl\[wandb\]"):
        trackers.start_trackers(
            LoggingSection(trackers=("wandb",)), TrackedRun(tmp_path, "r", {}, 0), history=[]
        )


class Keeping:
    """A tracker that already has the steps before `next_step`."""

    def __init__(self, next_step: int) -> None:
        self.next_step = next_step
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, Sequence[Row]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self.tables.append((step, rows))

    def close(self) -> None: ...


def test_a_tracker_takes_the_rows_it_lacks_before_new_ones() -> None:
    keeping = Keeping(next_step=2)
    history = [{"step": float(step), "a": step / 10} for step in range(4)]
    tracker = GuardedTracker("keeping", lambda: keeping, deadline_seconds=30, history=history)
    for step in (3, 4):
        tracker.log(step, {"a": 1.0})
    tracker.close()
    assert keeping.rows == [(2, {"a": 0.2}), (3, {"a": 0.3}), (4, {"a": 1.0})]


def test_a_tracker_takes_the_samples_of_steps_it_lacks() -> None:
    keeping = Keeping(next_step=2)
    tracker = GuardedTracker("keeping", lambda: keeping, deadline_seconds=30)
    for step in (1, 2):
        tracker.samples(step, [sample_row(step, 7)])
        tracker.samples(step, [])
        tracker.log(step, {"a": 1.0})
    tracker.close()
    assert keeping.tables == [(2, [sample_row(2, 7)])] and keeping.rows == [(2, {"a": 1.0})]


def test_tensorboard_holds_samples_and_settings_as_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = trackers.TensorBoardTracker(TrackedRun(tmp_path, "r", {"a": {"b": 1}}, 0))
    tracker.samples(3, [sample_row(3, 7, response="one\n<b>two</b>")])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    config, samples = (events.Tensors(f"{name}/text_summary")[0] for name in ("config", "samples/train"))
    assert config.tensor_proto.string_val[0].decode() == "    a.b: 1"
    text = samples.tensor_proto.string_val[0].decode()
    assert samples.step == 3 and "    response: one\n    <b>two</b>\n" in text
    assert [line.split(":")[0].strip() for line in text.splitlines() if ":" in line] == list(COLUMNS)


def test_one_word_is_a_list_of_one_tracker() -> None:
    assert LoggingSection.model_validate({"trackers": "wandb"}).trackers == ("wandb",)


def test_offline_starts_that_nobody_synced_are_put_aside(tmp_path: Path) -> None:
    def made(name: str, *files: str, last: int) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        (folder / LAST_STEP).write_text(str(last))
        return folder

    synced = made("offline-run-1-abc", "run-abc.wandb", "run-abc.wandb.synced", last=4)
    unsynced = made("offline-run-2-abc", "run-abc.wandb", last=9)
    others = made("offline-run-2-xyz", "run-xyz.wandb", last=7)
    resumed = made("offline-run-3-abc", "run-abc.wandb", last=0)
    assert after_synced(resumed, "abc") == 5
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {synced.name, f"replaced-{unsynced.name}", others.name, resumed.name}
