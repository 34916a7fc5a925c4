"""What a validation says of a reward model of several heads: how right each is alone, and how far they disagree. Pure.

The disagreement of a response is the standard deviation of its scores over the heads (over K, not K - 1), which is what the reward
kind `reward_model` subtracts a multiple of. In the distribution it is that of the held-out responses, out of it that of the style
probes' (mrl/data/style_probes.py), whose manners no pair had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.data.tune_rows import TuneRow
from mrl.loops.tuning.row_logprobs import Scores


def means_of(scores: Scores) -> dict[int, list[float]]:
    """The ensemble's score of each response: the mean over the heads."""
    return {number: each.mean(axis=1).tolist() for number, each in scores.items()}


def disagreements(scores: Scores) -> np.ndarray:
    """[all responses], row by row."""
    return np.concatenate([scores[number].std(axis=1) for number in range(len(scores))])


def ensemble_figures(
    rows: Sequence[TuneRow], scores: Scores, probes: Mapping[str, Scores]
) -> dict[str, float]:
    """Of pairs' scores, and of those of each probe's rows."""
    found = {f"/{name}": disagreements(each) for name, each in probes.items()}
    told = {
        f"val/preference/disagreement{name}": float(each.mean())
        for name, each in ({"": disagreements(scores)} | found).items()
    }
    return told | {"val/preference/head_accuracy": float(_accuracies(rows, scores).mean())}


def ensemble_report(rows: Sequence[TuneRow], scores: Scores, probes: Mapping[str, Scores]) -> dict[str, Any]:
    """The same in more words. `above_held_out`: the chance that a response of the probe has a larger disagreement than a held-out
    one, ties half (the area under the ROC curve; 0.5: disagreement does not tell them apart)."""
    held, accuracies = disagreements(scores), _accuracies(rows, scores)
    return {
        "count": len(accuracies),
        "accuracy_of_each": accuracies.tolist(),
        "disagreement": float(held.mean()),
        "disagreement_p99": float(np.quantile(held, 0.99)),
        "probes": {
            name: {"disagreement": float(own.mean()), "above_held_out": _share_above(own, held)}
            for name, own in ((name, disagreements(each)) for name, each in probes.items())
        },
    }


def ensemble_line(report: Mapping[str, Any]) -> str:
    """The report in one line for the screen."""
    alone = float(np.mean(report["accuracy_of_each"]))
    told = "".join(
        f", {name} {each['disagreement']:.3f} (above held-out {each['above_held_out']:.2f})"
        for name, each in report["probes"].items()
    )
    return f"{report['count']} heads, alone {alone:.4f} right; disagreement: held out {report['disagreement']:.3f}{told}"


def _accuracies(rows: Sequence[TuneRow], scores: Scores) -> np.ndarray:
    """[K] share of pairs that each head orders as their labels say, ties half."""
    difference = np.stack([scores[n][0] - scores[n][1] for n in range(len(rows))])
    probability = np.array([row.label.probability for row in rows])[:, None]
    right = np.where(difference > 0, probability, np.where(difference < 0, 1 - probability, 0.5))
    return right.T @ np.array([row.weight for row in rows]) / sum(row.weight for row in rows)


def _share_above(own: np.ndarray, held: np.ndarray) -> float:
    held = np.sort(held)
    below = np.searchsorted(held, own, "left") + np.searchsorted(held, own, "right")
    return float(below.mean() / 2 / len(held))
