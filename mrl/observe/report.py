"""`mrl report`: a run's curve and final figures as text."""

from __future__ import annotations

from pathlib import Path

from mrl.errors import DataError
from mrl.observe import metrics_log

BARS = " .:-=+*#%@"


def report(run_folder: str | Path) -> str:
    """Reward and validation curves of a run folder, one text block."""
    rows = metrics_log.read(Path(run_folder) / "metrics.jsonl")
    if not rows:
        raise DataError(f"{run_folder}/metrics.jsonl has no rows; is this a run folder?")
    lines = [f"{run_folder}: {int(rows[-1]['step'])} steps"]
    lines += [
        _curve(rows, name) for name in ("reward/mean", "policy/entropy", "rollout/response_tokens_mean")
    ]
    lines += ["validation:"]
    lines += [
        f"  step {int(r['step']):>4}  val/accuracy {r['val/accuracy']:.3f}"
        for r in rows
        if "val/accuracy" in r
    ]
    return "\n".join(lines)


def _curve(rows: list[dict[str, float]], name: str, width: int = 60) -> str:
    values = [float(r[name]) for r in rows if name in r]
    if not values:
        return f"  {name}: not logged"
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / ((high - low) or 1.0)
    bars = "".join(BARS[round((m - low) * scale)] for m in means)
    return f"  {name:<30} {values[0]:.3f} -> {values[-1]:.3f}  |{bars}|  {low:.3f}..{high:.3f}"
