"""Stops NaN and infinity before parameters change: rewards, log-probs, values, advantages, loss and gradient.

Consumes what the phases produced, on the driver, so that all ranks stop alike. Produces a NumericError that names the
samples; writing them down is the loop's (recorder.bad_samples).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mrl.errors import NumericError
from mrl.samples import Group, Role, TrainBatch, Verdict

SHOWN = 5
"""Sample ids in a message; the dump holds all."""


class BadNumbers(NumericError):
    """A NumericError that knows all its samples, and their groups where they are not yet a step's."""

    def __init__(self, message: str, sample_ids: Sequence[str] = (), groups: Sequence[Group] = ()) -> None:
        super().__init__(message, sample_ids, groups)
        self.sample_ids, self.groups = tuple(sample_ids), groups

    def __str__(self) -> str:
        return self.args[0]


def check_finite_rewards(groups: Sequence[Group]) -> None:
    """BadNumbers for verdicts whose value or token values are not finite; a missing value is not wrong."""
    bad = [s.sample_id for g in groups for s in g.samples if s.verdict and not _finite_verdict(s.verdict)]
    if bad:
        raise BadNumbers(_message("reward", bad, "the verifier must give numbers or no verdict"), bad, groups)


def check_batch(batch: TrainBatch, names: Iterable[str]) -> None:
    """BadNumbers for per-token arrays of these names that are not finite on a token that is trained on."""
    for name in names:
        finite = np.isfinite(batch.arrays[name])
        wrong = None if finite.all() else ~finite & batch.loss_mask
        if wrong is not None and wrong.any():
            owners = np.searchsorted(batch.cu_seqlens, np.flatnonzero(wrong), side="right") - 1
            bad = [batch.sample_ids[b] for b in np.unique(owners)]
            advice = "the weights or the engine are damaged; the last checkpoint is from before"
            raise BadNumbers(_message(name, bad, advice), bad)


def check_update(batch: TrainBatch, metrics: Mapping[str, float], role: Role) -> None:
    """BadNumbers where the ranks refused a role's optimizer step over `batch` (some token of it is trained on).

    The ranks cannot say which sample it was: all of the minibatch are named.
    """
    if metrics["skipped"]:
        loss, norm = metrics.get("loss", float("nan")), metrics["grad_norm"]
        what = f"loss {loss:g} or gradient norm {norm:g} of an optimizer step ({role})"
        advice = "the step changed no parameter; the last checkpoint is from before"
        raise BadNumbers(_message(what, batch.sample_ids, advice), batch.sample_ids)


def _finite_verdict(verdict: Verdict) -> bool:
    tokens = verdict.token_values
    whole = verdict.value is None or bool(np.isfinite(verdict.value))
    return whole and (tokens is None or not bool(np.isinf(tokens).any()))


def _message(what: str, bad: Sequence[str], advice: str) -> str:
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{what} is not finite in {len(bad)} sample(s): {', '.join(bad[:SHOWN])}{more}; {advice}"
