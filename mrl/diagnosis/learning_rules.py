"""Rules about what the policy learns: each combines a training signal with whether the run improves."""

from __future__ import annotations

import numpy as np

from mrl.diagnosis.findings import DiagnosedRun, Lever, Signs
from mrl.diagnosis.levers import advice, at_least, scaled_setting, switched
from mrl.diagnosis.metric_arrays import forward_fill, initial_value, noise, recent
from mrl.diagnosis.quality import VALIDATION

ENTROPY = 0.3
"""Share of the initial entropy below which it has collapsed, if the other signs are present."""
DISTINCT = 0.3
"""Share of distinct responses."""
WRONG = 0.2
"""Share of groups in which every sample is incorrect."""
LOST, LOST_BY = 0.1, 10
"""Share of its first value below which entropy is lost, and updates within which it must happen."""
EMPTY, KEPT = 0.9, 0.2
"""Shares of samples without an advantage, and of groups that a filter keeps."""
SPIKE, SPIKES, SPIKE_ROWS, MEDIAN_ROWS = 10.0, 3, 20, 100
"""Spike: a norm above SPIKE times the median of MEDIAN_ROWS; a sign: SPIKES of them in SPIKE_ROWS."""


def reward_hacked(run: DiagnosedRun) -> Signs:
    """Look for a rising training reward while validation, which reads its first part, falls."""
    q = run.quality
    levers = [
        *_kl(run),
        *_length_levers(run),
        *advice("another weight for the part that rose", "the policy exploits it"),
    ]
    against = ["validation reads the reward's first part, so that part must be the true objective"]
    return Signs(q.fell & q.reward_rose, [*_fall(run), *_kinds(run)], levers, against)


def rows_memorised(run: DiagnosedRun) -> Signs:
    """Look for the same with one verifier for both: reward hacking would raise the validation too."""
    q = run.quality
    best = run.curves.steps[q.best_row[-1]]
    levers = [
        *advice("more rows in data.train", "these are seen too often"),
        *advice(f"the checkpoint closest to step {best}", "the validation was best there"),
        *_kl(run),
    ]
    against = ["validation rows may be of another kind than training rows"]
    return Signs(q.fell & q.reward_rose & (not run.parts), [*_fall(run), *_kinds(run)], levers, against)


def _kl(run: DiagnosedRun) -> list[Lever]:
    now = run.number("algorithm.kl.coefficient")
    why = "keeps the policy near its start; KL to the reference is then also measured"
    location = switched(run, "algorithm.kl.location", "loss", why) if not now else []
    return [
        *location,
        *switched(run, "algorithm.kl.coefficient", f"{3 * now:g}" if now else "0.01", "its weight"),
    ]


def _length_levers(run: DiagnosedRun) -> list[Lever]:
    cut = recent(run.curves.values("rollout/truncated_frac"))
    if not len(cut) or not cut[-1] > 0.1:
        return []
    return switched(run, "algorithm.shaping.stop_properly", "0.5", "a truncated response earns half")


def _fall(run: DiagnosedRun) -> list[str]:
    q, steps = run.quality, run.curves.steps
    best = steps[q.best_row[-1]]
    return [
        f"{VALIDATION} was best at step {best} with {q.best[-1]:.3f} and is now {q.now[-1]:.3f}",
        f"reward/mean changed by {q.reward_change[-1]:+.3f} since (standard error {q.reward_error:.3f})",
    ]


def _kinds(run: DiagnosedRun) -> list[str]:
    """Return the metrics that changed meanwhile: they point to how the reward was hacked."""
    watched = ("reward/length_correlation", "rollout/truncated_frac", "rollout/shared_run_frac")
    lines = []
    for name in (*run.parts, *watched):
        values = run.curves.values(name)
        change = recent(values)[-1] - initial_value(values)
        if np.isfinite(change) and abs(change) > max(0.1, 2 * noise(values)):
            lines.append(f"{name} went from {initial_value(values):.3g} to {recent(values)[-1]:.3g}")
    return lines


def policy_collapsed(run: DiagnosedRun) -> Signs:
    """Look for validation and training reward that both fell since the best validation."""
    q = run.quality
    norms = run.curves.values("optim/grad_norm")
    evidence = [
        *_fall(run),
        f"optim/grad_norm was {initial_value(norms):.3g} at the start, {recent(norms)[-1]:.3g} lately",
    ]
    levers = [
        *scaled_setting(run, "training.optimizer.lr", 0.1, "updates are too large for their batches"),
        *at_least(run, "training.optimizer.warmup_steps", 10.0, "the first updates have no moments yet"),
        *_kl(run),
        *advice(
            "a new run from `mrl export RUN --step` of the best validation",
            "resuming keeps the damaged weights",
        ),
    ]
    against = ["a verifier that broke during the run looks the same: read the verdicts of the samples below"]
    return Signs(q.fell & q.reward_fell, evidence, levers, against)


def entropy_collapsed(run: DiagnosedRun) -> Signs:
    """Look for equal responses, groups that are all incorrect, and a validation that no longer rises."""
    entropy, distinct = (
        run.curves.values("policy/entropy"),
        recent(run.curves.values("rollout/distinct_frac")),
    )
    wrong, first, now = (
        recent(run.curves.values("group/all_incorrect_frac")),
        initial_value(entropy),
        recent(entropy),
    )
    sick = (now < ENTROPY * first) & (distinct < DISTINCT) & (wrong > WRONG) & run.quality.stalled
    evidence = [
        f"policy/entropy is {now[-1]:.3g} nats, {first:.3g} at the start",
        f"rollout/distinct_frac is {distinct[-1]:.3g}; group/all_incorrect_frac {wrong[-1]:.3g}: no sample "
        "is correct",
        f"{VALIDATION} has been below its best for {run.quality.checks_since[-1]} validations",
    ]
    levers = [
        *at_least(
            run, "algorithm.loss.clip_high", 0.28, "lets rare tokens rise (DAPO's value, for ppo_clip)"
        ),
        *switched(run, "algorithm.entropy.target", f"{first / 2:.3g}", "adds a bonus below it"),
        *scaled_setting(run, "training.optimizer.lr", 0.5, "slower updates leave more time to explore"),
        *at_least(run, "rollout.temperature", 1.0, "samples from the policy's own distribution"),
    ]
    return Signs(sick, evidence, levers, [])


def entropy_lost(run: DiagnosedRun) -> Signs:
    """Look for entropy near 0 within the first updates, with a reward not above the first step's."""
    entropy, rewards = run.curves.values("policy/entropy"), run.curves.values("reward/mean")
    first = int(np.flatnonzero(np.isfinite(entropy))[0])
    low = entropy < LOST * entropy[first]
    early = np.logical_or.accumulate(low & (np.arange(len(low)) <= first + LOST_BY))
    sick = early & (forward_fill(entropy) < LOST * entropy[first]) & (recent(rewards) <= rewards[first])
    evidence = [
        f"policy/entropy is {forward_fill(entropy)[-1]:.3g} nats, {entropy[first]:.3g} at step "
        f"{run.curves.steps[first]}",
        f"reward/mean is {recent(rewards)[-1]:.3f} (mean of the last rows), {rewards[first]:.3f} "
        "at that step",
    ]
    levers = [
        *scaled_setting(run, "training.optimizer.lr", 0.1, "one update moved the policy to a single answer"),
        *at_least(run, "training.optimizer.warmup_steps", 10.0, "the first updates have no moments yet"),
        *advice("a new run", "resuming keeps the damaged weights"),
    ]
    return Signs(sick, evidence, levers, [])


def data_solved(run: DiagnosedRun) -> Signs:
    """Look for most groups without a gradient because every sample is correct."""
    empty, right, wrong = _empty(run)
    rewards = forward_fill(run.curves.values("reward/mean"))
    evidence = [
        *_gradient_evidence(run),
        f"reward/mean is {rewards[-1]:.3f}; group/all_correct_frac {right[-1]:.3g}",
    ]
    levers = [
        *advice("harder rows in data.train", "these teach nothing more"),
        *_filter(run),
        *advice("or stop here and `mrl export` the run", "it has learned what these rows can teach"),
    ]
    against = ["a verifier that accepts every sample looks the same: read the samples below"]
    return Signs(empty & (right > wrong), evidence, levers, [*_validation_below(run), *against])


def no_gradient(run: DiagnosedRun) -> Signs:
    """Look for most groups without a gradient for another reason."""
    empty, right, wrong = _empty(run)
    evidence = [
        *_gradient_evidence(run),
        f"group/all_incorrect_frac is {wrong[-1]:.3g}, group/all_correct_frac {right[-1]:.3g}",
    ]
    levers = [
        *scaled_setting(run, "loop.samples_per_prompt", 2.0, "more samples find rare correct responses"),
        *_filter(run),
        *advice("easier rows in data.train, or an SFT start (`mrl tune`)", "too few responses are correct"),
    ]
    return Signs(empty & ~(right > wrong), evidence, levers, [])


def _empty(run: DiagnosedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [S] whether gradients are nearly gone; the shares of groups all correct and all incorrect."""
    c = run.curves
    degenerate, kept = recent(c.values("group/degenerate_samples_frac")), recent(c.values("group/kept_frac"))
    right, wrong = recent(c.values("group/all_correct_frac")), recent(c.values("group/all_incorrect_frac"))
    return (degenerate > EMPTY) | (kept < KEPT), right, wrong


def _gradient_evidence(run: DiagnosedRun) -> list[str]:
    names = ("group/degenerate_samples_frac", "group/kept_frac")
    return [f"{name} is {recent(run.curves.values(name))[-1]:.3g}" for name in names]


def _filter(run: DiagnosedRun) -> list[Lever]:
    if run.settings.get("algorithm.filter", "") != "null":
        return []
    why = "replaces groups without a gradient by newly sampled ones"
    return [Lever("algorithm.filter", "null", "{max_rounds: 4}", why)]


def _validation_below(run: DiagnosedRun) -> list[str]:
    if not run.curves.has(VALIDATION) or run.quality.now[-1] > 0.9:
        return []
    return [f"{VALIDATION} is {run.quality.now[-1]:.3f}: the training rows are solved, the task is not"]


def gradient_spikes(run: DiagnosedRun) -> Signs:
    """Look for repeated spikes of the gradient norm while the validation is below its best."""
    norms = run.curves.values("optim/grad_norm")
    medians = _medians(norms)
    spikes = (norms > SPIKE * medians).astype(np.float64)
    count = np.round(recent(spikes, SPIKE_ROWS) * np.minimum(np.arange(len(norms)) + 1, SPIKE_ROWS))
    evidence = [
        f"optim/grad_norm was above {SPIKE:g} times its median ({medians[-1]:.3g}) in {count[-1]:.0f} of the "
        f"last {SPIKE_ROWS} rows",
        *_fall(run)[:1],
    ]
    levers = [
        *scaled_setting(run, "training.optimizer.lr", 0.5, "smaller updates"),
        *scaled_setting(run, "training.optimizer.clip_grad", 0.5, "bounds the effect of one batch"),
        *advice("the samples below and those of these steps", "a few of them dominate the norm"),
    ]
    return Signs((count >= SPIKES) & run.quality.stalled, evidence, levers, [])


def _medians(values: np.ndarray) -> np.ndarray:
    """Return [S] medians of the finite values among the last MEDIAN_ROWS, including the row's own."""
    padded = np.concatenate([np.full(MEDIAN_ROWS - 1, np.nan), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_ROWS)
    has_values = np.isfinite(windows).any(axis=1)
    medians = np.full(len(values), np.nan)
    medians[has_values] = np.nanmedian(windows[has_values], axis=1)
    return medians
