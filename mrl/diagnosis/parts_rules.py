"""Rules about failing parts of a run other than the policy: engines, critic, verifiers."""

from __future__ import annotations

import numpy as np

from mrl.diagnosis.findings import DiagnosedRun, Signs
from mrl.diagnosis.levers import advice, at_least, scaled_setting, switched
from mrl.diagnosis.metric_arrays import forward_fill, initial_value, recent
from mrl.diagnosis.quality import VALIDATION

MISMATCH = "policy/rollout_mismatch_kl"
MISMATCH_TIMES, MISMATCH_NATS = 10.0, 0.01
"""Growth over the start, and nats per token below which growth is ignored."""
LEFT = "policy/correction_gradient_frac"
LEAST_LEFT = 0.3
"""Share of the gradient's norm below which a correction has removed most of it."""
ERROR_TIMES = 2.0
"""Growth of a critic's squared error over its start."""
EXPLAINED, LEAST_EXPLAINED, SETTLED = 0.02, 0.002, 20
"""Shares of the returns' variance above which a critic explains something and below which nothing, and the
rows that it has to learn. Between the two it has twice as many rows if the mean is above 0 by two standard
errors: returns that hardly vary take longer to learn."""
NO_REWARD = 0.02
"""Share of samples without a reward."""


def engines_apart(run: DiagnosedRun) -> Signs:
    """Look for a growing difference between engine and trainer log-probs of the same tokens."""
    kl = forward_fill(run.curves.values(MISMATCH))
    first = initial_value(kl)
    weight = forward_fill(run.curves.values("policy/rollout_weight_geometric"))[-1]
    evidence = [
        f"{MISMATCH} is {kl[-1]:.3g} nats per token, {first:.2g} at the start, over tokens of the newest "
        "version outside router near-ties"
    ]
    if np.isfinite(weight):
        evidence.append(f"policy/rollout_weight_geometric is {weight:.3g}; 1 where both agree")
    levers = [
        *switched(run, "sync.verify", "full", "compares each version with the trainer's before it serves"),
        *switched(run, "sync.verify_every", "1", "compares at every weight sync"),
        *switched(
            run, "rollout.enforce_eager", "true", "a captured graph may still read the old weights' memory"
        ),
        *switched(
            run, "algorithm.correction.kind", "truncated", "bounds the effect of an unavoidable difference"
        ),
    ]
    if run.settings.get("loop.max_rollout_mismatch", "null") == "null":
        levers += switched(run, "loop.max_rollout_mismatch", "0.5", "ends a run whose engines diverge")
    against = []
    if run.settings.get("rollout.quantization", "none") != "none":
        against.append("the engines are quantised (rollout.quantization), which causes some difference")
    if run.settings.get("rollout.dtype") != run.settings.get("training.dtype"):
        against.append("engines and trainer compute in different types (rollout.dtype, training.dtype)")
    return Signs(kl > max(MISMATCH_TIMES * first, MISMATCH_NATS), evidence, levers, against)


def correction_takes_gradient(run: DiagnosedRun) -> Signs:
    """Look for weights of algorithm.correction that leave less than LEAST_LEFT of the gradient's norm."""
    left = recent(run.curves.values(LEFT))
    kind = run.settings.get("algorithm.correction.kind", "")
    names = ("policy/correction_weight", "policy/correction_dropped_frac", MISMATCH)
    latest = {name: recent(run.curves.values(name))[-1] for name in names}
    evidence = [
        f"{LEFT} is {left[-1]:.3g} (mean of the last rows): the share of the gradient's norm that is left",
        *(f"{name} is {value:.3g}" for name, value in latest.items() if np.isfinite(value)),
    ]
    levers = []
    if kind == "sequence_mask":
        why = "keeps sequences with a larger mismatch"
        levers += at_least(run, "algorithm.correction.high", 1.01, why)
        levers += switched(run, "algorithm.correction.low", "0.99", why)
    if kind != "truncated":
        why = "bounds each token's weight and drops none"
        levers += switched(run, "algorithm.correction.kind", "truncated", why)
    levers += advice(
        "what makes engine and trainer differ (`docs/algorithms.md`)",
        "a smaller difference needs less correction",
    )
    return Signs(left < LEAST_LEFT, evidence, levers, [])


def critic_lost(run: DiagnosedRun) -> Signs:
    """Look for a critic worse than a constant and than its own start, or long no better than a constant."""
    errors, explained = (
        run.curves.values("critic/error_squared"),
        run.curves.values("critic/explained_variance"),
    )
    first, now, lately = initial_value(errors), recent(errors), recent(explained, SETTLED)
    after = run.curves.steps - (run.number("critic.warmup_steps") or 0)
    diverged = (recent(explained) < 0) & (now > ERROR_TIMES * first) & (after > 0)
    chance = np.sqrt(np.maximum(recent(explained**2, SETTLED) - lately**2, 0.0) / SETTLED)
    begins = (lately > np.maximum(LEAST_EXPLAINED, 2 * chance)) & (after <= 2 * SETTLED)
    useless = (lately < EXPLAINED) & (after > SETTLED) & ~begins
    evidence = [
        f"critic/explained_variance is {lately[-1]:.2g} (mean of {SETTLED} rows): a constant explains 0",
        f"critic/error_squared is {now[-1]:.3g} (mean of the last rows), {first:.3g} at the start",
    ]
    levers = [
        *scaled_setting(run, "critic.optimizer.lr", 0.1, "its updates overshoot"),
        *scaled_setting(run, "critic.warmup_steps", 2.0, "values settle before they are used"),
        *advice("algorithm.estimator.name=grpo without section critic", "needs no values"),
    ]
    return Signs(diverged | useless, evidence, levers, [*_rises(explained), *_returns_grew(run)])


def _rises(explained: np.ndarray) -> list[str]:
    before, now = recent(explained[:-SETTLED], SETTLED)[-1:], recent(explained, SETTLED)[-1]
    if len(before) and now > max(2 * before[0], 0):
        return ["critic/explained_variance rises slowly: the critic may still learn"]
    return []


def _returns_grew(run: DiagnosedRun) -> list[str]:
    returns = np.abs(forward_fill(run.curves.values("critic/return_mean")))
    grew = len(returns) and returns[-1] > ERROR_TIMES * initial_value(returns) > 0
    return ["critic/return_mean has also grown, and errors grow with its scale"] if grew else []


def verifier_silent(run: DiagnosedRun) -> Signs:
    """Look for a verifier that gives all samples the same value so far, or no value to too many."""
    high, low = run.curves.values("reward/max"), run.curves.values("reward/min")
    missing = recent(np.nan_to_num(run.curves.values("reward/no_reward_frac")))
    differed = np.logical_or.accumulate(high > low)
    seen = np.logical_or.accumulate(np.isfinite(high))
    silent = ~differed & seen & ~_all_right(run)
    evidence = []
    if not differed[-1]:
        evidence.append(f"reward/max = reward/min = {forward_fill(high)[-1]:.3g} in every step so far")
    if missing[-1] > NO_REWARD:
        evidence.append(f"reward/no_reward_frac is {missing[-1]:.3g} (mean of the last rows)")
    levers = advice(
        "mrl rewards show CONFIG --row 1 --explain",
        "shows what each stage of the verifier reads and returns for one row's own answer",
    )
    against = ["the task may be so hard or so easy that samples do not differ: look at the samples"]
    return Signs(silent | (missing > NO_REWARD), evidence, levers, against)


def _all_right(run: DiagnosedRun) -> np.ndarray:
    """Return [S] whether every sample is correct, but not all of the validation: the rows are solved."""
    right, checked = (
        forward_fill(run.curves.values("group/all_correct_frac")),
        forward_fill(run.curves.values(VALIDATION)),
    )
    return (right == 1) & (checked > 0) & (checked < 1)
