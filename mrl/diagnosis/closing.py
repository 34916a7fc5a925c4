"""Write a run's last line: how it ended, and its first finding. Pure: rows and settings in, text out."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.diagnosis.rules import diagnose
from mrl.observe.metric_curves import Curves

ADVANTAGE = "advantage/abs_max"
LEAST_STEPS = 5
"""Steps without any advantage after which a run counts as having learned nothing."""


def learned_nothing(curves: Curves, settings: Mapping[str, str]) -> bool:
    """Return True if no step of the run had a non-zero advantage, and nothing else was learned from."""
    if any(name.startswith("algorithm.distillation.") for name in settings):
        return False
    largest = curves.values(ADVANTAGE)[curves.steps > 0]
    return curves.has(ADVANTAGE) and len(largest) >= LEAST_STEPS and not (largest > 0).any()


def closing_line(name: str, ended: str, curves: Curves, settings: Mapping[str, str]) -> str:
    """Return the run's last line; `name` is its folder, `ended` how it ended."""
    last = max(0, int(curves.steps[-1])) if len(curves) else 0
    line = f"{name}: {ended} after step {last}"
    findings = diagnose(curves, settings).findings
    if learned_nothing(curves, settings):
        line += (
            f"; nothing was learned: in all {last} steps the samples of a prompt had equal rewards, so every "
            "advantage was 0"
        )
    if findings:
        first = findings[0]
        others = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        line += f"; {first.rule} since step {first.since}: {first.title}{others}"
        line += f"; run `mrl diagnose {name}` to see what to change"
    return line
