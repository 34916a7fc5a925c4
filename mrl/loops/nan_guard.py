"""Stop on NaN and infinity before parameters change: rewards, log-probs, values, advantages, loss, gradient.

Checks what the phases produced, on the driver, so that all ranks stop together. Raises a NumericError that
names the samples; the loop writes them to a file (recorder.bad_samples)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mrl.errors import NumericError
from mrl.samples import Group, Role, TrainBatch, Verdict

SHOWN = 5
"""Sample ids in a message; the file contains all."""


class BadNumbers(NumericError):
    """NumericError with all its samples, and their groups if those do not belong to a step yet."""

    def __init__(self, message: str, sample_ids: Sequence[str] = (), groups: Sequence[Group] = ()) -> None:
        super().__init__(message, sample_ids, groups)
        self.sample_ids, self.groups = tuple(sample_ids), groups

    def __str__(self) -> str:
        return self.args[0]


def check_finite_rewards(groups: Sequence[Group]) -> None:
    """Raise BadNumbers if a verdict's value or token values are not finite; a missing value is allowed."""
    bad = [s.sample_id for g in groups for s in g.samples if s.verdict and not _finite_verdict(s.verdict)]
    if bad:
        raise BadNumbers(_message("reward", bad, "the verifier must give numbers or no verdict"), bad, groups)


def check_batch(batch: TrainBatch, names: Iterable[str]) -> None:
    """Raise BadNumbers if one of these per-token arrays is not finite on a trained token."""
    for name in names:
        finite = np.isfinite(batch.arrays[name])
        wrong = None if finite.all() else ~finite & batch.loss_mask
        if wrong is not None and wrong.any():
            owners = np.searchsorted(batch.cu_seqlens, np.flatnonzero(wrong), side="right") - 1
            bad = [batch.sample_ids[b] for b in np.unique(owners)]
            advice = "the weights or the engine are damaged; the last checkpoint predates this step"
            raise BadNumbers(_message(name, bad, advice), bad)


def check_update(batch: TrainBatch, metrics: Mapping[str, float], role: Role) -> None:
    """Raise BadNumbers if the ranks refused a role's optimizer step over `batch`, which has trained tokens.

    The ranks cannot tell which sample caused it, so the error names the whole minibatch.
    """
    if metrics["skipped"]:
        loss, norm = metrics.get("loss", float("nan")), metrics["grad_norm"]
        quantity = f"loss {loss:g} or gradient norm {norm:g} of an optimizer step ({role})"
        advice = "the step changed no parameter; the last checkpoint predates it"
        raise BadNumbers(_message(quantity, batch.sample_ids, advice), batch.sample_ids)


def _finite_verdict(verdict: Verdict) -> bool:
    tokens = verdict.token_values
    whole = verdict.value is None or bool(np.isfinite(verdict.value))
    return whole and (tokens is None or not bool(np.isinf(tokens).any()))


def _message(quantity: str, bad: Sequence[str], advice: str) -> str:
    suffix = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{quantity} is not finite in {len(bad)} sample(s): {', '.join(bad[:SHOWN])}{suffix}; {advice}"
