"""One run folder as JSON values, as far as it can be read, and what is missing in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mrl.config.flat import flat
from mrl.errors import DataError
from mrl.report.curves import Curves
from mrl.report.rows import Reading, rows
from mrl.report.samples import SamplesShown


def read_run(folder: Path, *, max_bytes: int, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """What the page shows of one run; samples of at most `max_bytes`, of these steps alone where given. Each file is read once.

    DataError where the folder has neither metrics nor samples.
    """
    readings = {name: Reading(f"{name}.jsonl") for name in ("metrics", "samples")}
    curves, samples = Curves(), SamplesShown(max_bytes, steps)
    for row in rows(folder / "metrics.jsonl", readings["metrics"]):
        curves.add(row)
    for row in rows(folder / "samples.jsonl", readings["samples"]):
        samples.add(row)
    if not curves.rows and not samples.seen:
        raise DataError(f"{folder} has no rows of metrics and no samples; is this a run folder?")
    notes = [note for reading in readings.values() for note in reading.notes()]
    config = _config(folder / "config.yaml", notes)
    facts = {name: _json(folder / f"{name}.json", notes) for name in ("versions", "hardware", "summary")}
    facts["summary"].pop("last", None)
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "notes": notes + _left_out(curves, samples),
        "curves": curves.tree(),
        "samples": samples.tree(),
        "config": config,
        "facts": {name: dict(flat(tree)) for name, tree in facts.items()},
    }


def _config(path: Path, notes: list[str]) -> dict[str, str]:
    """The settings by their dotted names."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, dict):
        notes.append(f"{path.name} cannot be read.")
        return {}
    return dict(flat(tree))


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is not there.")
        return {}
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        notes.append(f"{path.name} cannot be read.")
        return {}
    return tree


def _left_out(curves: Curves, samples: SamplesShown) -> list[str]:
    """What is there and not shown one by one."""
    shown, notes = samples.tree(), []
    width, kept = curves.tree()["rows_per_point"], len(shown["rows"])
    if width > 1:
        notes.append(
            f"{curves.rows} rows of metrics: a point is the mean of {width} rows, with their range behind it."
        )
    if curves.skipped:
        notes.append(
            f"metrics.jsonl: {curves.skipped} rows have no step, or one that was there before; left out."
        )
    for name, (count, first) in curves.not_finite.items():
        notes.append(f"{name}: no finite number in {count} rows, first at step {first}; a gap in its curve.")
    if samples.made_again:
        notes.append(f"{samples.made_again} samples of steps that a resumed run made again are left out.")
    if kept < samples.seen - samples.made_again:
        of_steps = f"; {samples.outside} are of other steps" if samples.outside else ""
        notes.append(
            f"{kept} of {samples.seen} samples are here, whole prompts chosen evenly by a hash{of_steps}; "
            "--steps FIRST-LAST shows those of some steps, --megabytes more of them."
        )
    if samples.seen and not any("tokens" in row for row in shown["rows"]):
        notes.append("No sample has values of its tokens (logging.token_values).")
    return notes
