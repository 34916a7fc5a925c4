"""Summarize a run for the head of the page: status, progress, best validation, model, hardware, version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mrl.files import has_living_owner
from mrl.observe.metric_curves import Curves
from mrl.report.text import VALIDATED


def run_overview(
    curves: Curves, points: Mapping[str, Any], settings: Mapping[str, Any], lock: Path | None
) -> dict[str, Any]:
    """Return JSON values; `points` are the curves as drawn, `settings` contain config and facts as text."""
    config, facts = settings["config"], settings["facts"]
    step, hours = points["step"] or [0], points["hours"] or [0.0]
    written = config.get("tune.steps" if curves.names("tune/") else "loop.steps", "")
    steps = _number(written)
    half = (len(step) - 1) // 2
    pace = 3600 * (hours[-1] - hours[half]) / max(1, step[-1] - step[half])
    devices = [(name.partition("."), count) for name, count in facts["hardware"].items()]
    status, reason = _status(lock, facts["summary"], step[-1], steps)
    return {
        "status": status,
        "reason": reason,
        "step": step[-1],
        "steps": steps,
        "seconds": hours[-1] * 3600,
        "seconds_left": pace * max(0, (steps or 0) - step[-1]),
        "best": _best_validation(curves),
        "model": config.get("model.path", ""),
        "version": " ".join(facts["versions"].get(name, "") for name in ("mrl", "commit")).strip(),
        "hardware": ", ".join(f"{n} x {name[2]}" for name, n in devices if name[0] == "trainer_devices"),
    }


def _status(lock: Path | None, summary: Mapping[str, str], step: int, steps: int | None) -> tuple[str, str]:
    """Return running, done, failed or stopped, and why; the owner of a running run's lock is alive."""
    ended, last_step = summary.get("ended", ""), _number(summary.get("steps", ""))
    if lock is not None and has_living_owner(lock):
        return "running", ""
    if not ended or (last_step is not None and last_step < step):  # of an earlier start
        is_complete = steps is not None and step >= steps
        return ("done", "") if is_complete else ("stopped", "its last start wrote no summary.json")
    if ended == "failed" or re.match(r"\w+: ", ended):  # class and message of an error
        return "failed", ended
    return ("done", "") if ended == "done" else ("stopped", ended)


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None


def _best_validation(curves: Curves) -> dict[str, Any] | None:
    for name in VALIDATED:
        if curves.has(name):
            values = curves.values(name)
            place = int(np.nanargmin(values) if name == "val/loss" else np.nanargmax(values))
            return {"metric": name, "value": float(values[place]), "step": int(curves.steps[place])}
    return None
