"""One run folder as JSON values, as far as it can be read, and what is missing in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.config.flat import flat
from mrl.config.merge import tree_of
from mrl.errors import DataError
from mrl.observe.metric_curves import Curves, drawn, rows_per_point
from mrl.report.log_rows import ReadSummary, read_log_rows
from mrl.report.samples_shown import SamplesShown

FACTS = ("versions", "hardware", "summary")
"""Files of a run folder, beside its settings."""


def run_folder(folder: Path) -> Path:
    """The folder; what `mrl tune` wrote in it, where nothing else did."""
    inner = folder / "tune"
    rows = ("metrics.jsonl", "samples.jsonl")
    return (
        inner
        if (inner / rows[0]).is_file() and not any((folder / name).exists() for name in rows)
        else folder
    )


def run_name(folder: Path) -> str:
    """What a run is called: its folder, and for one of `mrl tune` the folder around it too."""
    path = folder.resolve()
    return "/".join(path.parts[-2:]) if path.name == "tune" else path.name


def read_run(folder: Path, *, max_bytes: int, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """What the page shows of one run; samples of at most `max_bytes`, of these steps alone where given. Each file is read once.

    DataError where the folder has neither metrics nor samples.
    """
    readings = {name: ReadSummary(f"{name}.jsonl") for name in ("metrics", "samples")}
    curves = Curves(read_log_rows(folder / "metrics.jsonl", readings["metrics"]))
    samples = SamplesShown(max_bytes, steps)
    for row in read_log_rows(folder / "samples.jsonl", readings["samples"]):
        samples.add(row)
    if not len(curves) and not samples.seen:
        raise DataError(f"{folder} has no rows of metrics and no samples; is this a run folder?")
    notes = [note for reading in readings.values() for note in reading.notes()]
    settings = _settings_of(folder, notes)
    return {
        "name": run_name(folder),
        "folder": str(folder),
        "notes": notes + curve_notes(curves) + _left_out(samples),
        "curves": drawn(curves),
        "samples": samples.tree(),
        **settings,
    }


def _settings_of(folder: Path, notes: list[str]) -> dict[str, Any]:
    """`config` and `facts` of a run folder by dotted names; what is missing goes into the notes."""
    config = tree_in(folder, "config.yaml", tree_of, notes)
    facts = {name: tree_in(folder, f"{name}.json", json.loads, notes) for name in FACTS}
    facts["summary"].pop("last", None)
    return {"config": dict(flat(config)), "facts": {name: dict(flat(tree)) for name, tree in facts.items()}}


def inside(folder: Path, name: str) -> Path | None:
    """A file of a folder, there or not; None for a link that leads out of it, and for what is there and no plain file."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return None
    return path if path.is_file() or not path.exists() else None


def tree_in(folder: Path, name: str, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """Return what a file of a folder says; empty, and a note, if it is missing or cannot be read."""
    path = inside(folder, name)
    try:
        tree = parse(path.read_text(encoding="utf-8")) if path is not None else None
    except FileNotFoundError:
        notes.append(f"{name} is not there.")
        return {}
    except (ValueError, RecursionError, OSError):
        tree = None
    if not isinstance(tree, dict):
        notes.append(f"{name} cannot be read.")
        return {}
    return tree


def curve_notes(curves: Curves) -> list[str]:
    """What is there of the metrics and not drawn one by one."""
    width, notes = rows_per_point(curves), []
    if width > 1:
        notes.append(
            f"{len(curves)} rows of metrics: a point is the mean of {width} rows, with their range behind it."
        )
    if curves.skipped:
        notes.append(f"metrics.jsonl: {curves.skipped} rows have no step; left out.")
    for name, (count, first) in curves.not_finite.items():
        notes.append(f"{name}: no finite number in {count} rows, first at step {first}; a gap in its curve.")
    return notes


def _left_out(samples: SamplesShown) -> list[str]:
    """What is there of the samples and not shown one by one."""
    shown, notes = samples.tree(), []
    kept = len(shown["rows"])
    if samples.made_again:
        notes.append(f"{samples.made_again} samples of steps that a resumed run made again are left out.")
    if kept < samples.seen - samples.made_again:
        of_steps = f"; {samples.outside} are of other steps" if samples.outside else ""
        notes.append(
            f"{kept} of {samples.seen} samples are here, whole prompts chosen evenly by a hash{of_steps}; "
            "--steps FIRST-LAST shows those of some steps, --megabytes more of them."
        )
    if samples.seen and not any("tokens" in row for row in shown["rows"]):
        notes.append("No sample has values of its tokens.")
    return notes
