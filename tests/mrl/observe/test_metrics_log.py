"""metrics.jsonl is complete, ordered, and logs no step twice."""

import json
import math
from pathlib import Path

from mrl.observe.metrics_log import MetricsLog, read, without_volatile


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
