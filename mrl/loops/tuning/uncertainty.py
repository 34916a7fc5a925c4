"""What a validation says of how sure a reward model is: how far its heads disagree, or the deviations that it gives. Pure.

The disagreement of a response is the standard deviation of its scores over the heads (over K, not K - 1); a model that gives distributions
says a deviation itself (sigma). The reward kind `reward_model` subtracts a multiple of either. In the distribution it is that of the
held-out responses, out of it that of the style probes' (mrl/data/style_probes.py), whose manners no pair had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.config.sections.tune import ObjectiveSection
from mrl.data.tune_rows import TuneRow, by_tag
from mrl.loops.tuning.row_logprobs import Scores


def means_of(section: ObjectiveSection, scores: Scores) -> dict[int, list[float]]:
    """The score of each response: the mean over the heads, or that of its distribution."""
    is_mean = slice(1) if section.distribution is not None else slice(None)
    return {number: each[:, is_mean].mean(axis=1).tolist() for number, each in scores.items()}


def spreads(section: ObjectiveSection, scores: Scores) -> np.ndarray:
    """[all responses], row by row: disagreements, or deviations."""
    known = (scores[number] for number in range(len(scores)))
    if section.distribution is not None:
        return np.concatenate([np.exp(each[:, 1]) for each in known])
    return np.concatenate([each.std(axis=1) for each in known])


def spread_figures(
    section: ObjectiveSection, rows: Sequence[TuneRow], scores: Scores, probes: Mapping[str, Scores]
) -> dict[str, float]:
    """Of pairs' scores, and of those of each probe's rows."""
    found = {"": scores} | {f"/{name}": each for name, each in probes.items()}
    told = {
        f"val/preference/{_word(section)}{name}": float(spreads(section, each).mean())
        for name, each in found.items()
    }
    if section.heads > 1:
        told["val/preference/head_accuracy"] = float(_accuracies(rows, scores).mean())
    return told


def spread_report(
    section: ObjectiveSection, rows: Sequence[TuneRow], scores: Scores, probes: Mapping[str, Scores]
) -> dict[str, Any]:
    """The same in more words. `above_held_out`: the chance that a response of the probe has a larger spread than a held-out one, ties half
    (the area under the ROC curve; 0.5: the spread does not tell them apart); `above_others`: that one of a tag has a larger one than
    the other held-out ones."""
    held, word = spreads(section, scores), _word(section)
    report: dict[str, Any] = {word: float(held.mean()), f"{word}_p99": float(np.quantile(held, 0.99))}
    if section.heads > 1:
        accuracies = _accuracies(rows, scores)
        report |= {"count": len(accuracies), "accuracy_of_each": accuracies.tolist()}
    of_rows = held.reshape(len(rows), -1)
    report["by_tag"] = {
        tag: {
            word: float(of_rows[own].mean()),
            "above_others": _share_above(of_rows[own].ravel(), of_rows[~own].ravel()),
        }
        for tag, own in by_tag(rows).items()
    }
    report["probes"] = {
        name: {word: float(own.mean()), "above_held_out": _share_above(own, held)}
        for name, own in ((name, spreads(section, each)) for name, each in probes.items())
    }
    return report


def spread_line(section: ObjectiveSection, report: Mapping[str, Any]) -> str:
    """The report in one line for the screen."""
    word, line = _word(section), ""
    if section.heads > 1:
        alone = float(np.mean(report["accuracy_of_each"]))
        line = f"{report['count']} heads, alone {alone:.4f} right; "
    tags = "".join(
        f", {tag} {each[word]:.3f} (above the others {each['above_others']:.2f})"
        for tag, each in report["by_tag"].items()
    )
    probes = "".join(
        f", {name} {each[word]:.3f} (above held-out {each['above_held_out']:.2f})"
        for name, each in report["probes"].items()
    )
    return f"{line}{word}: held out {report[word]:.3f}{tags}{probes}"


def _word(section: ObjectiveSection) -> str:
    return "sigma" if section.distribution is not None else "disagreement"


def _accuracies(rows: Sequence[TuneRow], scores: Scores) -> np.ndarray:
    """[K] share of pairs that each head orders as their labels say, ties half."""
    difference = np.stack([scores[n][0] - scores[n][1] for n in range(len(rows))])
    probability = np.array([row.label.probability for row in rows])[:, None]
    right = np.where(difference > 0, probability, np.where(difference < 0, 1 - probability, 0.5))
    return right.T @ np.array([row.weight for row in rows]) / sum(row.weight for row in rows)


def _share_above(own: np.ndarray, others: np.ndarray) -> float:
    others = np.sort(others)
    below = np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")
    return float(below.mean() / 2 / len(others))
