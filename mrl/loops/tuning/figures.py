"""What a validation of `mrl tune` says, from the log-probs of its rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mrl.algorithms.preference import PairLoss, Side, pair_metrics, rewards
from mrl.config.sections.tune import ObjectiveSection
from mrl.data.tune_rows import TuneRow


def demonstration_figures(
    rows: Sequence[TuneRow], logprobs: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """Mean negative log-prob of the trained tokens."""
    tokens = sum(int(row.responses[0].mask.sum()) for row in rows)
    return {"val/loss": -sum(logprobs[n][0] for n in range(len(rows))) / tokens, "val/rows": float(len(rows))}


def preference_figures(
    section: ObjectiveSection,
    loss: PairLoss | None,
    rows: Sequence[TuneRow],
    logprobs: Mapping[int, Sequence[float]],
    ref_logprobs: Mapping[int, Sequence[float]] | None,
) -> dict[str, float]:
    """What pairs, or labelled responses (where `loss` is None), say."""
    sides = [_side(rows, i, logprobs, ref_logprobs) for i in range(len(rows[0].responses))]
    found = {"val/rows": float(len(rows))}
    if loss is None:
        return found | _label_figures(section, sides[0], np.array([row.sides[0] for row in rows]))
    chosen, rejected = sides
    weight = torch.tensor([row.weight for row in rows], dtype=torch.float64)
    share = weight / weight.sum()
    found["val/loss"] = float((loss(section, chosen, rejected) * share).sum())
    found |= {
        f"val/{name}": float(value) for name, value in pair_metrics(section, chosen, rejected, share).items()
    }
    margin = (rewards(section, chosen) - rewards(section, rejected)).numpy()
    longer = (chosen.length - rejected.length).numpy()
    found["val/preference/margin_p10"] = float(np.quantile(margin, 0.1))
    if margin.std() and longer.std():
        found["val/preference/length_correlation"] = float(np.corrcoef(margin, longer)[0, 1])
    if (longer < 0).any():
        found["val/preference/accuracy_shorter_chosen"] = float((margin[longer < 0] > 0).mean())
    return found


def _label_figures(section: ObjectiveSection, side: Side, wanted: np.ndarray) -> dict[str, float]:
    """Accuracy of labelled responses: how often a wanted one has the larger reward than an unwanted one."""
    reward = rewards(section, side).numpy()
    up, down = np.sort(reward[wanted]), np.sort(reward[~wanted])
    found = {
        f"val/preference/reward_{n}": float(r.mean())
        for n, r in (("chosen", up), ("rejected", down))
        if len(r)
    }
    if len(up) and len(down):
        below = np.searchsorted(down, up, "left") + np.searchsorted(down, up, "right")
        found["val/preference/accuracy"] = float(below.mean() / 2 / len(down))
    return found


def _side(
    rows: Sequence[TuneRow],
    which: int,
    logprobs: Mapping[int, Sequence[float]],
    ref_logprobs: Mapping[int, Sequence[float]] | None,
) -> Side:
    def of(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    numbers = range(len(rows))
    reference = [0.0 if ref_logprobs is None else ref_logprobs[n][which] for n in numbers]
    lengths = [max(1, int(row.responses[which].mask.sum())) for row in rows]
    return Side(of([logprobs[n][which] for n in numbers]), of(reference), of(lengths))
