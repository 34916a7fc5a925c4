"""Diagnose a run folder, as far as it can be read."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mrl.config.flat import flat
from mrl.config.merge import tree_of
from mrl.diagnosis.findings import Diagnosis
from mrl.diagnosis.rules import RULES, diagnose
from mrl.errors import DataError
from mrl.observe.metric_curves import Curves
from mrl.report.log_rows import ReadSummary, read_log_rows
from mrl.report.run_data import tree_in

SHOWN = 3
"""Samples per finding."""
KEPT_ROWS = 256
"""Last training samples of the file from which they are chosen."""


def diagnose_folder(folder: Path) -> tuple[Diagnosis, list[str]]:
    """Return the run's diagnosis and notes on unreadable files; raise DataError without metrics rows."""
    metrics, samples = ReadSummary("metrics.jsonl"), ReadSummary("samples.jsonl")
    curves = Curves(read_log_rows(folder / "metrics.jsonl", metrics))
    if not len(curves):
        raise DataError(f"{folder}/metrics.jsonl has no rows; is this a run folder?")
    if curves.has("tune/loss"):
        raise DataError(
            f"{folder} was written by `mrl tune`, but the rules are for `mrl train`; use `mrl report` for "
            "its curves"
        )
    notes: list[str] = []
    settings = dict(flat(tree_in(folder, "config.yaml", tree_of, notes)))
    notes += _not_finite(curves)
    diagnosis = diagnose(curves, settings)
    if diagnosis.findings:
        last = _last_samples(read_log_rows(folder / "samples.jsonl", samples))
        diagnosis = dataclasses.replace(
            diagnosis,
            findings=[
                dataclasses.replace(f, samples=choose_samples(last, f.since, RULES[f.rule].samples))
                for f in diagnosis.findings
            ],
        )
        notes += samples.notes()
    return diagnosis, metrics.notes() + notes


def choose_samples(samples: Iterable[dict[str, Any]], since: int, which: str) -> list[str]:
    """Return ids of at most SHOWN samples from step `since` on, one per prompt: those with the `highest` or
    `lowest` rewards, latest first among equals."""
    sign = -1.0 if which == "highest" else 1.0
    judged = [
        (sign * float(row["reward"]), -int(row["step"]), str(row["sample_id"]))
        for row in samples
        if isinstance(row.get("reward"), int | float)
        and isinstance(row.get("step"), int)
        and row["step"] >= since
    ]
    ids: dict[str, str] = {}
    for _, _, name in sorted(judged):
        ids.setdefault(name.rpartition(".")[0], name)
    return list(ids.values())[:SHOWN]


def _last_samples(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    training = (row for row in samples if row.get("kind") == "train" and "sample_id" in row)
    return list(deque(training, maxlen=KEPT_ROWS))


def _not_finite(curves: Curves) -> list[str]:
    """Return one sentence about values that are not finite."""
    if not curves.not_finite:
        return []
    name, (count, first) = min(curves.not_finite.items(), key=lambda item: item[1][1])
    return [
        f"metrics.jsonl: NaN or infinity in {len(curves.not_finite)} metrics, first in {name} at step "
        f"{first} ({count} rows): rules ignore these values."
    ]
