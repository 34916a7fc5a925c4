"""metrics.jsonl is complete, ordered, and logs no step twice."""

import json
import math
import tracemalloc
from pathlib import Path

import pytest

from mrl.observe.ledger_log import InFlightPrompts, LedgerLog
from mrl.observe.metrics_log import LoggedRows, MetricsLog, read, without_volatile


def test_resume_drops_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(4):
        log.write(step, {"reward/mean": step / 3})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    log.resume_at(2)
    log.write(2, {"reward/mean": 9.0})
    assert [(r["step"], r["reward/mean"]) for r in read(tmp_path / "metrics.jsonl")] == [
        (0, 0.0),
        (1, 1 / 3),
        (2, 9.0),
    ]


def test_rows_are_strict_json(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m.jsonl").write(0, {"a": math.nan, "b": math.inf, "c": 1.5})
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda c: 1 / 0)
    assert row == {"step": 0, "a": "nan", "b": "inf", "c": 1.5}


def test_volatile_fields_are_those_of_speed_and_memory() -> None:
    row = {
        "step": 1,
        "time/update_seconds": 3.0,
        "mem/driver_bytes": 1.0,
        "reward/mean": 0.5,
        "sync/bytes": 7.0,
        "sync/seconds": 1.0,
    }
    assert without_volatile(row) == {"step": 1, "reward/mean": 0.5, "sync/bytes": 7.0}


NO_ROWS = [b'{"step": 1, "rew', b"\xff\xfe\x00", b"[1, 2]", b"12", b'{"step": "x"}', b"[" * 9999]


@pytest.mark.parametrize("line", NO_ROWS)
def test_what_is_no_row_costs_no_other_row(line: bytes, tmp_path: Path) -> None:
    """Also in the middle, where a disk lost something: later rows survive a resume."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n{"step": 3}\n')
    assert [row["step"] for row in read(path)] == [0, 2, 3]
    MetricsLog(path).resume_at(3)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line + b"\n"
    MetricsLog(path).resume_at(3)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line + b"\n"


def test_the_ledger_counts_its_starts_over_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for step in (1, 3):
        LedgerLog(path).start(step, InFlightPrompts((), 0))
    path.write_bytes(b"\xff damaged\n" + path.read_bytes())
    log = LedgerLog(path)
    log.start(4, InFlightPrompts((), 0))
    assert log.attempt == 3


def test_a_start_holds_a_row_at_a_time_however_long_the_run_was(tmp_path: Path) -> None:
    rows = {f"moe/figure_{number}": number / 7 for number in range(100)}
    lines = "".join(json.dumps({"step": step, **rows}) + "\n" for step in range(600))
    ledger = "".join(
        json.dumps({"step": step, "trained": f"{16 * step}-{16 * step + 15}"}) + "\n" for step in range(9000)
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "ledger.jsonl").write_text(ledger)
    metrics, prompts = MetricsLog(tmp_path / "metrics.jsonl"), LedgerLog(tmp_path / "ledger.jsonl")
    tracemalloc.start()
    try:
        metrics.resume_at(599)
        assert metrics.has(598) and not metrics.has(599)
        undone = prompts.start(8998, InFlightPrompts((), 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert undone == [16, 16]
    assert min(len(lines), len(ledger)) > 300_000 > 4 * peak, peak


def test_rows_are_those_of_the_moment_that_they_were_asked_for(tmp_path: Path) -> None:
    """A tracker reads them in its own thread while the run writes on; later rows are sent to it."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    none = LoggedRows(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.write(step, {})
    rows = LoggedRows(tmp_path / "metrics.jsonl")
    log.write(3, {})
    assert [[row["step"] for row in rows] for _ in range(2)] == [[0, 1, 2]] * 2
    assert not list(none)
