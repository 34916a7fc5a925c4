"""Show a run's curves as text, for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.observe.metric_curves import Curves, curve_points
from mrl.report.log_rows import ReadSummary, read_log_rows

BARS = " .:-=+*#%@"
VALIDATIONS = 20
"""Most validation lines."""
SHOWN = ("reward/mean", "policy/entropy", "rollout/response_tokens_mean")
SHOWN_OF_TUNE = ("tune/loss", "tune/grad_norm")
VALIDATED = ("val/reward", "val/preference/accuracy", "val/loss")
"""Validation metrics; the first one that a run has is shown."""


def run_text(folder: Path) -> str:
    """Return reward and validation of a run folder; raise DataError without metrics and samples."""
    reading = ReadSummary("metrics.jsonl")
    curves = Curves(read_log_rows(folder / "metrics.jsonl", reading))
    if not len(curves):
        if not (folder / "samples.jsonl").is_file():
            raise DataError(f"{folder}/metrics.jsonl has no rows; is this a run folder?")
        return f"{folder}: metrics.jsonl has no rows. {' '.join(reading.notes())}"
    tree = curve_points(curves)
    metrics = tree["metrics"]
    shown = SHOWN_OF_TUNE if SHOWN_OF_TUNE[0] in metrics else SHOWN
    lines = [f"{folder}: {tree['step'][-1]} steps", *reading.notes()]
    lines += [_curve(metrics, name) for name in shown]
    for name in (name for name in shown if name in curves.not_finite):
        count, first = curves.not_finite[name]
        lines.append(f"  {name}: no finite number in {count} rows, first at step {first}")
    return "\n".join([*lines, *_validations(tree["step"], metrics)])


def _validations(steps: list[int], metrics: dict[str, Any]) -> list[str]:
    name = next((name for name in VALIDATED if name in metrics), VALIDATED[0])
    means = metrics.get(name, {"mean": []})["mean"]
    points = [(step, mean) for step, mean in zip(steps, means, strict=False) if mean is not None]
    title = "validation:" if len(points) <= VALIDATIONS else f"the last {VALIDATIONS} validations:"
    return [title, *(f"  step {step:>4}  {name} {mean:.3f}" for step, mean in points[-VALIDATIONS:])]


def _curve(metrics: dict[str, Any], name: str, width: int = 60) -> str:
    values = [value for value in metrics.get(name, {"mean": []})["mean"] if value is not None]
    if not values:
        return f"  {name}: not logged"
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / ((high - low) or 1.0)
    bars = "".join(BARS[round((m - low) * scale)] for m in means)
    return f"  {name:<30} {values[0]:.3f} -> {values[-1]:.3f}  |{bars}|  {low:.3f}..{high:.3f}"
