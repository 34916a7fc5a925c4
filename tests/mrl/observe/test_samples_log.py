"""Rows of samples.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mrl.observe.samples_log import SamplesLog
from tests.support.samples import make_groups, make_sample, verdict_of


def test_a_row_has_the_smallest_and_the_largest_version_of_its_tokens(tmp_path: Path) -> None:
    """Not only the first token's; a response without tokens has none."""
    versions = np.array([2, 2, 3, 5], np.int32)
    samples = [
        make_sample(0, 0, length=4, policy_versions=versions, verdict=verdict_of(1.0)),
        make_sample(0, 1, length=0, verdict=verdict_of(0.0)),
    ]
    SamplesLog(tmp_path / "samples.jsonl", limit=9).write(1, make_groups(samples))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["policy_versions"] for row in rows] == [[2, 5], None]


def test_a_resumed_run_drops_the_rows_of_steps_that_it_makes_again(tmp_path: Path) -> None:
    """Drops only rows at the end, including a cut row; foreign rows and those of earlier versions stay."""
    path = tmp_path / "samples.jsonl"
    rows = ['{"step": 1, "kind": "a"}', "{}", '{"step": 5}', '{"step": 2}']
    path.write_text("\n".join([*rows, '{"step": 3}', '{"step": 4}', '{"step": 4']))
    assert SamplesLog(path, limit=9).resume_at(3) == 3
    assert path.read_text().splitlines() == rows and path.read_text().endswith("\n")
    assert SamplesLog(path, limit=9).resume_at(3) == 0 == SamplesLog(tmp_path / "none", limit=9).resume_at(3)


def test_what_a_validation_wrote_that_is_made_again_goes_too(tmp_path: Path) -> None:
    """Trained samples of the step and earlier validations stay."""
    path, samples = tmp_path / "samples.jsonl", make_groups([make_sample(0, 0, verdict=verdict_of(1.0))])
    log = SamplesLog(path, limit=9)
    for step in (1, 2):
        log.write(step, samples)
        log.write(step, samples, kind="validation")
    assert log.resume_at(3) == 0 and log.resume_at(3, validated=False) == 1
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["kind"]) for r in rows] == [(1, "train"), (1, "validation"), (2, "train")]
