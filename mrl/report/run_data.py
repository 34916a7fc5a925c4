"""Read one run folder as JSON values, as far as possible, and note what is missing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
from pydantic_core import to_jsonable_python

from mrl.config.describe import section_types
from mrl.config.flat import flat
from mrl.config.merge import tree_of
from mrl.config.root import Config
from mrl.errors import DataError
from mrl.observe.metric_curves import Curves, curve_points, rows_per_point
from mrl.report.log_rows import ReadSummary, read_log_rows
from mrl.report.run_overview import run_overview
from mrl.report.samples_shown import SamplesShown

FACTS = ("versions", "hardware", "summary")
"""Files of a run folder besides its settings."""


def run_folder(folder: Path) -> Path:
    """Return the folder, or its `tune` folder if only `mrl tune` wrote there."""
    inner = folder / "tune"
    rows = ("metrics.jsonl", "samples.jsonl")
    is_tuned = (inner / rows[0]).is_file() and not any((folder / name).exists() for name in rows)
    return inner if is_tuned else folder


def run_name(folder: Path) -> str:
    """Return the run's folder name; for `mrl tune`, with the parent's name."""
    path = folder.resolve()
    return "/".join(path.parts[-2:]) if path.name == "tune" else path.name


def read_run(folder: Path, *, max_bytes: int, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return what the page shows of one run, reading each file once; raise DataError without metrics and
    samples.

    Args:
        max_bytes: Most bytes of samples.
        steps: First and last step of the samples; None takes all.
    """
    readings = {name: ReadSummary(f"{name}.jsonl") for name in ("metrics", "samples")}
    curves = Curves(read_log_rows(folder / "metrics.jsonl", readings["metrics"]))
    samples = SamplesShown(max_bytes, steps)
    for row in read_log_rows(folder / "samples.jsonl", readings["samples"]):
        samples.add(row)
    if not len(curves) and not samples.seen:
        raise DataError(f"{folder} has no rows of metrics and no samples; is this a run folder?")
    notes = [note for reading in readings.values() for note in reading.notes()]
    settings, points, shown = _settings_of(folder, notes), curve_points(curves), samples.tree()
    return {
        "name": run_name(folder),
        "folder": str(folder),
        "notes": notes + curve_notes(curves) + _left_out(samples, shown["rows"]),
        "overview": run_overview(curves, points, settings, inside(folder, "lock")),
        "curves": points,
        "samples": shown,
        **settings,
    }


def _settings_of(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return `config`, `differing` (setting -> default) and `facts` by dotted names; note what is missing."""
    config = tree_in(folder, "config.yaml", tree_of, notes)
    facts = {name: tree_in(folder, f"{name}.json", json.loads, notes) for name in FACTS}
    facts["summary"].pop("last", None)
    settings, defaults = dict(flat(config)), dict(flat(_defaults(Config)))
    differing = {name: defaults.get(name, "") for name in settings if settings[name] != defaults.get(name)}
    flat_facts = {name: dict(flat(tree)) for name, tree in facts.items()}
    return {"config": settings, "differing": differing, "facts": flat_facts}


@functools.cache
def _defaults(section: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the default of each setting of a section that has one, as JSON values."""
    defaults = {}
    for name, field in section.model_fields.items():
        if not field.is_required():
            defaults[name] = to_jsonable_python(field.get_default(call_default_factory=True))
        elif sections := section_types(field.annotation):
            defaults[name] = _defaults(sections[0])
    return defaults


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a folder; None if it leads outside or is there but not a plain file."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return None
    return path if path.is_file() or not path.exists() else None


def tree_in(folder: Path, name: str, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """Return the content of a file in a folder; empty, with a note, if it is missing or unreadable."""
    path = inside(folder, name)
    try:
        tree = parse(path.read_text(encoding="utf-8")) if path is not None else None
    except FileNotFoundError:
        notes.append(f"{name} does not exist.")
        return {}
    except (ValueError, RecursionError, OSError):
        tree = None
    if not isinstance(tree, dict):
        notes.append(f"{name} cannot be read.")
        return {}
    return tree


def curve_notes(curves: Curves) -> list[str]:
    """Return notes on metrics that are not drawn point by point."""
    width, notes = rows_per_point(curves), []
    if width > 1:
        notes.append(
            f"{len(curves)} rows of metrics: a point is the mean of {width} rows, with their range behind it."
        )
    if curves.skipped:
        notes.append(f"metrics.jsonl: {curves.skipped} rows without a step are omitted.")
    for name, (count, first) in curves.not_finite.items():
        notes.append(f"{name}: no finite number in {count} rows, first at step {first}; a gap in its curve.")
    return notes


def _left_out(samples: SamplesShown, rows: list[dict[str, Any]]) -> list[str]:
    """Return notes on samples that are not shown; `rows` are."""
    kept, notes = len(rows), []
    if samples.made_again:
        notes.append(f"{samples.made_again} samples of steps that a resumed run repeated are omitted.")
    if kept < samples.seen - samples.made_again:
        of_steps = f"; {samples.outside} are of other steps" if samples.outside else ""
        notes.append(
            f"{kept} of {samples.seen} samples are shown, whole prompts chosen evenly by a hash{of_steps}; "
            "--steps FIRST-LAST selects steps, --megabytes shows more."
        )
    if samples.seen and not any("tokens" in row for row in rows):
        notes.append("No sample has per-token values.")
    return notes
