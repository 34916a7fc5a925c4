"""What a validation says of a process reward model, from the scores of judged steps. Pure.

Steps of a response are not independent, so intervals are of responses: of those with a wrong step, how often the first step that
scores below 0 is the first wrong one, and of those without one, how often none does (ProcessBench, arXiv 2412.06559, with the
harmonic mean of the two, f1). Where labels are probabilities, a step is right above 1/2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mrl.algorithms.reward_model_objective import label_losses, step_metrics
from mrl.config.sections.tune import ObjectiveSection
from mrl.data.tune_rows import TuneRow, by_tag
from mrl.rewards.trials.agreement import wilson

StepScores = Mapping[int, np.ndarray]
"""Row's number -> [S] the scores of its judged steps."""


def step_figures(section: ObjectiveSection, rows: Sequence[TuneRow], scores: StepScores) -> dict[str, float]:
    """Of all judged steps, and of the responses' first errors, by tag too."""
    found, labels = _flat(rows, scores)
    count = len(found)
    figures = {"val/rows": float(len(rows)), "val/steps": float(count)}
    figures["val/loss"] = float(label_losses(section, found, labels).sum() / count)
    figures |= {
        f"val/process/{name}": float(value) for name, value in step_metrics(found, labels, count).items()
    }
    told = _first_errors(rows, scores)
    figures |= _shares(told, np.ones(len(rows), bool))
    for tag, own in by_tag(rows).items():
        figures |= {f"{name}/{tag}": value for name, value in _shares(told, own).items()}
    return figures


def step_report(rows: Sequence[TuneRow], scores: StepScores) -> dict[str, Any]:
    """The same in more words, with intervals of 95 %."""
    found, labels = _flat(rows, scores)
    told, everything = _first_errors(rows, scores), np.ones(len(rows), bool)
    accuracy = step_metrics(found, labels, len(found))["accuracy"]
    return {
        "responses": len(rows),
        "steps": len(found),
        "accuracy": float(accuracy),
        **_intervals(told, everything),
        "by_tag": {tag: _intervals(told, own) for tag, own in by_tag(rows).items()},
    }


def step_line(report: Mapping[str, Any]) -> str:
    """The report in one line for the screen."""
    parts = []
    for name, words in (
        ("found_error", "first error found in {:.4f} of {} responses with one"),
        ("passed_right", "none seen in {:.4f} of {} without"),
    ):
        if each := report[name]:
            low, high = each["interval"]
            said = words.format(each["share"], each["responses"])
            parts.append(f"{said} (95 %: {low:.4f} to {high:.4f})")
    return "; ".join([f"steps judged as labelled: {report['accuracy']:.4f} of {report['steps']}", *parts])


def _flat(rows: Sequence[TuneRow], scores: StepScores) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] scores and labels of all judged steps, float64."""
    found = np.concatenate([scores[n] for n in range(len(rows))]).astype(np.float64)
    labels = np.array([label for row in rows for label in row.step_labels], np.float64)
    return torch.from_numpy(found), torch.from_numpy(labels)


def _first_errors(rows: Sequence[TuneRow], scores: StepScores) -> tuple[np.ndarray, np.ndarray]:
    """Of each response: whether a judged step is wrong, [R] bool, and whether the first one that scores below 0 is the first
    wrong one, or none is where none is wrong, [R] bool."""
    wrong = [_first(np.array(row.step_labels) < 0.5) for row in rows]
    seen = [_first(scores[n] < 0) for n in range(len(rows))]
    return np.array([each is not None for each in wrong]), np.array(
        [a == b for a, b in zip(wrong, seen, strict=True)]
    )


def _first(flags: np.ndarray) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def _shares(told: tuple[np.ndarray, np.ndarray], own: np.ndarray) -> dict[str, float]:
    """Of the `own` [R] responses; what has no response is left out."""
    found = {name: each["share"] for name, each in _intervals(told, own).items() if each}
    if len(found) == 2:
        low, high = sorted(found.values())
        found["f1"] = 2 * low * high / (low + high) if low else 0.0
    return {f"val/process/{name}": value for name, value in found.items()}


def _intervals(told: tuple[np.ndarray, np.ndarray], own: np.ndarray) -> dict[str, dict[str, Any]]:
    """Of the `own` [R] responses; empty of a kind that none of them is."""
    has_error, agrees = told
    report: dict[str, dict[str, Any]] = {}
    for name, group in (("found_error", own & has_error), ("passed_right", own & ~has_error)):
        count, right = int(group.sum()), int(agrees[group].sum())
        report[name] = (
            {"responses": count, "share": right / count, "interval": wilson(right, count)} if count else {}
        )
    return report
