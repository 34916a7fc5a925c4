"""A run folder is taken as far as it goes, also where it is cut, replaced or older; memory is bounded."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mrl.observe.metrics_log import MetricsLog
from mrl.report import rows as report_rows
from mrl.report.rows import Tail
from mrl.watch.index import Query, SampleIndex
from mrl.watch.run import LiveRun
from tests.support.run_folders import metrics_row, sample_row, write_run


def read(folder: Path, **options: Any) -> dict[str, Any]:
    run = LiveRun(folder, "run", **options)
    while run.read(10**6):
        pass
    return run.tree()


def test_a_row_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, tail = tmp_path / "m.jsonl", Tail(tmp_path / "m.jsonl")
    assert list(tail.rows()) == [] and not tail.reading.is_there
    path.write_text('{"a": 1}\n{"a"')
    assert list(tail.rows()) == [(0, 9, {"a": 1})] and tail.unfinished == 4
    assert list(tail.rows()) == []
    with path.open("a") as file:
        file.write(': 2}\n{"a": 3}\n')
    assert [row for _, _, row in tail.rows()] == [{"a": 2}, {"a": 3}]
    assert (tail.reading.lines, tail.reading.unread, tail.behind) == (3, 0, 0)


def test_a_line_without_end_is_passed_over_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rows, "LONGEST", 100)
    path, tail = tmp_path / "m.jsonl", Tail(tmp_path / "m.jsonl")
    for _ in range(5):
        with path.open("a") as file:
            file.write("x" * 170)
        assert list(tail.rows()) == [] and tail.unfinished < 100
    with path.open("a") as file:
        file.write('\n{"a": 1}\n')
    assert [row for _, _, row in tail.rows()] == [{"a": 1}]
    assert (tail.reading.lines, tail.reading.unread, tail.reading.first_unread) == (2, 1, 1)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """What was read is overwritten in place, and is not seen again."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    assert len(list(tail.rows())) == 2
    with path.open("r+") as file:
        file.write('{"a": 7}\n')
    with path.open("a") as file:
        file.write('{"a": 3}\n')
    assert [row for _, _, row in tail.rows()] == [{"a": 3}] and not tail.replaced()


def test_the_end_of_a_long_file_is_begun_at_a_whole_row(tmp_path: Path) -> None:
    samples = [sample_row(step, step) for step in range(100)]
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)], samples=samples)
    size, row = (folder / "samples.jsonl").stat().st_size, len(json.dumps(samples[99])) + 1
    tree = read(folder, samples_read=3 * row)
    assert tree["samples"]["seen"] == 3
    skipped = f"samples.jsonl: the first {(size - 3 * row) / 1e9:.3g} GB are older than what is read here."
    assert skipped in tree["notes"]


def test_a_resumed_run_is_read_again_and_its_samples_replace_the_earlier(tmp_path: Path) -> None:
    samples = [sample_row(step, step, response="dead") for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", metrics=map(metrics_row, (1, 2, 3)), samples=samples)
    run = LiveRun(folder, "run")
    run.read(10**6)
    log = MetricsLog(folder / "metrics.jsonl")
    log.resume_at(2)
    for step in range(2, 40):  # longer than the file was
        log.write(step, {"reward/mean": 9.0})
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample_row(2, 2, response="alive")) + "\n")
    run.read(10**6)
    assert run.tree()["curves"]["step"] == list(range(1, 40))
    assert run.tree()["curves"]["metrics"]["reward/mean"]["mean"] == [0.1, *[9.0] * 38]
    numbers, steps = run.index.find(Query(), run.index.end)
    assert (numbers.tolist(), steps.tolist()) == ([3, 0], [2.0, 1.0])
    with run.reader() as sample:
        assert (sample(3) or {})["response"] == "alive" and sample(99) is None
    assert "2 samples of steps that a resumed run made again are left out." in run.tree()["notes"]


def test_what_is_missing_damaged_or_of_another_version_is_named(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        metrics=[metrics_row(1, **{"reshard/seconds": 1.0, "policy/loss": "nan"})],
        config="a: [",
    )
    (folder / "metrics.jsonl").open("a").write('{"step": 2, "rew\n{"step": 3, "reward/mean": NaN}\n')
    tree = read(folder)
    said = "\n".join(tree["notes"])
    for missing in (
        "samples.jsonl is not there.", "config.yaml cannot be read.", "summary.json is not there.",
        "metrics.jsonl: 1 of 3 lines are no rows (cut in its middle or damaged), first line 2.",
        "policy/loss: no finite number in 1 rows, first at step 1", "reward/mean: no finite number in 1 rows",
    ):  # fmt: skip
        assert missing in said
    assert tree["curves"]["step"] == [1, 3] and "reshard/seconds" in tree["curves"]["metrics"]
    json.dumps(tree, allow_nan=False)


def test_rows_of_other_kinds_of_values_are_indexed(tmp_path: Path) -> None:
    index = SampleIndex()
    for row in ({}, {"step": "x", "reward": True, "kind": 3}, {"step": 2, "reward": None, "domain": ["a"]}):
        index.add(0, 1, row)
    numbers, steps = index.find(Query(), index.end)
    assert (numbers.tolist(), steps.tolist()) == ([2, 1, 0], [2.0, -1.0, -1.0])
    assert index.find(Query(ranges={"reward": (-1e9, 1e9)}), index.end)[0].tolist() == []
    assert index.values()["domain"] == ["['a']"]


def test_the_oldest_samples_make_room() -> None:
    index = SampleIndex(most=4096)
    for number in range(10_000):
        index.add(number, 1, {"step": number, "prompt": str(number % 7), "kind": "train"})
    numbers, _ = index.find(Query(), index.end)
    assert numbers[0] == 9999 and len(numbers) <= 4096 and index.left_out == 10_000 - len(numbers)
    assert index.place(9999) == (9999, 1) and index.place(0) is None and index.place(10_000) is None
    assert numbers.tolist() == list(range(9999, 9999 - len(numbers), -1))


def test_a_file_that_cannot_be_read_for_a_while_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shared file system does it: the handle is stale, then the file is there again."""
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)])
    run = LiveRun(folder, "run")
    opened = Path.open

    def stale(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "metrics.jsonl":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", stale)
        run.read(10**6)
        assert "metrics.jsonl cannot be read: Stale file handle." in run.tree()["notes"]
    version = run.version
    run.read(10**6)
    assert run.version > version and run.tree()["curves"]["step"] == [1]
    assert not any("cannot be read: " in note for note in run.tree()["notes"])
