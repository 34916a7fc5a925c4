"""Validation metrics of `mrl tune`, from the log-probs or the scores of its rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mrl.algorithms.preference import PairLoss, Side, pair_metrics, rewards
from mrl.algorithms.reward_model_objective import pair_losses, score_metrics
from mrl.config.sections.tune import ObjectiveSection
from mrl.data.tune_rows import TuneRow, by_tag
from mrl.loops.tuning.row_logprobs import Scores
from mrl.rewards.trials.agreement import wilson


def demonstration_figures(
    rows: Sequence[TuneRow], logprobs: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """Return the mean negative log-prob of the trained tokens."""
    tokens = sum(int(row.responses[0].mask.sum()) for row in rows)
    return {"val/loss": -sum(logprobs[n][0] for n in range(len(rows))) / tokens, "val/rows": float(len(rows))}


def preference_figures(
    section: ObjectiveSection,
    loss: PairLoss | None,
    rows: Sequence[TuneRow],
    logprobs: Mapping[int, Sequence[float]],
    ref_logprobs: Mapping[int, Sequence[float]] | None,
) -> dict[str, float]:
    """Return the metrics of pairs, or of labelled responses if `loss` is None."""
    sides = [_side(rows, i, logprobs, ref_logprobs) for i in range(len(rows[0].responses))]
    figures = {"val/rows": float(len(rows))}
    if loss is None:
        return figures | _label_figures(section, sides[0], np.array([row.sides[0] for row in rows]))
    chosen, rejected = sides
    share = 1 / len(rows)
    figures["val/loss"] = float((loss(section, chosen, rejected) * share).sum())
    figures |= {
        f"val/{name}": float(value) for name, value in pair_metrics(section, chosen, rejected, share).items()
    }
    margin = (rewards(section, chosen) - rewards(section, rejected)).numpy()
    figures |= _margin_figures(margin, (chosen.length - rejected.length).numpy())
    return figures | _tag_figures(rows, margin)


def score_figures(section: ObjectiveSection, rows: Sequence[TuneRow], scores: Scores) -> dict[str, float]:
    """Return the metrics of a reward model's scores of pairs, with the 95 % interval of their accuracy."""

    def of(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    chosen, rejected = (of(scores[n][side] for n in range(len(rows))) for side in (0, 1))
    margin, probability = of(row.label.margin for row in rows), of(row.label.probability for row in rows)
    share = 1 / len(rows)
    metrics = score_metrics(chosen, rejected, probability, share)
    loss = (pair_losses(section, chosen, rejected, margin, probability) * share).sum()
    figures = {"val/rows": float(len(rows)), "val/loss": float(loss)}
    figures |= {f"val/{name}": float(value) for name, value in metrics.items()}
    accuracy, both = figures["val/preference/accuracy"], torch.cat([chosen, rejected])
    low, high = wilson(accuracy * len(rows), len(rows))
    figures |= {"val/preference/accuracy_low": low, "val/preference/accuracy_high": high}
    figures |= {
        "val/preference/score_mean": float(both.mean()),
        "val/preference/score_std": float(both.std(correction=0)),
    }
    longer = [len(row.responses[0].tokens) - len(row.responses[1].tokens) for row in rows]
    figures |= _margin_figures((chosen - rejected).numpy(), np.array(longer))
    return figures | _tag_figures(rows, (chosen - rejected).numpy())


def score_report(rows: Sequence[TuneRow], scores: Scores) -> dict[str, Any]:
    """Return a reward model's report on held-out pairs: its accuracy, also by tag, and its scores' spread."""
    chosen, rejected = (np.array([scores[n][side] for n in range(len(rows))]) for side in (0, 1))
    probability = np.array([row.label.probability for row in rows])
    difference, both = chosen - rejected, np.concatenate([chosen, rejected])
    right = np.where(difference > 0, probability, np.where(difference < 0, 1 - probability, 0.5))
    return {
        "pairs": len(rows),
        "accuracy": float(right.mean()),
        "accuracy_interval": wilson(float(right.sum()), len(rows)),
        "by_tag": {
            tag: {
                "pairs": int(members.sum()),
                "accuracy": float(right[members].mean()),
                "accuracy_interval": wilson(float(right[members].sum()), int(members.sum())),
            }
            for tag, members in by_tag(rows).items()
        },
        "score_mean": float(both.mean()),
        "score_std": float(both.std()),
    }


def report_line(report: Mapping[str, Any]) -> str:
    """Return the report as one line for the screen."""
    low, high = report["accuracy_interval"]
    return (
        f"held-out accuracy {report['accuracy']:.4f} (95 %: {low:.4f} to {high:.4f}) over "
        f"{report['pairs']} pairs"
    )


def _margin_figures(margin: np.ndarray, longer: np.ndarray) -> dict[str, float]:
    """Return the metrics of [P] margins, given the extra tokens [P] of the chosen responses."""
    figures = {"val/preference/margin_p10": float(np.quantile(margin, 0.1))}
    if margin.std() and longer.std():
        figures["val/preference/length_correlation"] = float(np.corrcoef(margin, longer)[0, 1])
    if (longer < 0).any():
        figures["val/preference/accuracy_shorter_chosen"] = float((margin[longer < 0] > 0).mean())
    return figures


def _tag_figures(rows: Sequence[TuneRow], margin: np.ndarray) -> dict[str, float]:
    """Return the accuracy of each tag's pairs by their [P] margins; a tie counts half."""
    right = (np.sign(margin) + 1) / 2
    return {
        f"val/preference/accuracy/{tag}": float(right[members].mean())
        for tag, members in by_tag(rows).items()
    }


def _label_figures(section: ObjectiveSection, side: Side, wanted: np.ndarray) -> dict[str, float]:
    """Return how often a wanted response has a larger reward than an unwanted one, and the mean rewards."""
    reward = rewards(section, side).numpy()
    up, down = np.sort(reward[wanted]), np.sort(reward[~wanted])
    figures = {
        f"val/preference/reward_{n}": float(r.mean())
        for n, r in (("chosen", up), ("rejected", down))
        if len(r)
    }
    if len(up) and len(down):
        below = np.searchsorted(down, up, "left") + np.searchsorted(down, up, "right")
        figures["val/preference/accuracy"] = float(below.mean() / 2 / len(down))
    return figures


def _side(
    rows: Sequence[TuneRow],
    side: int,
    logprobs: Mapping[int, Sequence[float]],
    ref_logprobs: Mapping[int, Sequence[float]] | None,
) -> Side:
    def of(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    numbers = range(len(rows))
    reference = [0.0 if ref_logprobs is None else ref_logprobs[n][side] for n in numbers]
    lengths = [max(1, int(row.responses[side].mask.sum())) for row in rows]
    return Side(of([logprobs[n][side] for n in numbers]), of(reference), of(lengths))
