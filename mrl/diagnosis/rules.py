"""Table of rules, and the diagnosis by them. Pure: rows and settings in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mrl.diagnosis import learning_rules, parts_rules
from mrl.diagnosis.findings import PART, DiagnosedRun, Diagnosis, Finding, Signs
from mrl.diagnosis.metric_arrays import standing
from mrl.diagnosis.quality import VALIDATION
from mrl.observe.metric_curves import Curves

ADVICE = {
    VALIDATION: "validation (data.validation, loop.validation.every_steps)",
    PART: "a reward of several parts whose first part, which validation reads, is the true objective",
    "rollout/distinct_frac": "loop.samples_per_prompt above 1, and a run of this version",
}
"""Ways to get a missing metric, if its name alone does not explain it."""


class Rule(NamedTuple):
    """Signs of one kind of failure."""

    title: str
    look: Callable[[DiagnosedRun], Signs]
    needs: tuple[str, ...]
    """Metrics without which it cannot decide."""
    rows: int
    """Consecutive rows in which its signs must be present."""
    samples: str
    """Samples that show it: the highest or the lowest rewards of the last steps."""
    only_with: str = ""
    """Metric without which the run cannot fail in this way."""


RULES = {
    "engines_apart": Rule(
        "engines and trainer diverge: tokens are sampled from other weights than those trained",
        parts_rules.engines_apart,
        (parts_rules.MISMATCH,),
        3,
        "lowest",
    ),
    "correction_takes_gradient": Rule(
        "the correction removes most of the gradient: its weights leave little to learn from",
        parts_rules.correction_takes_gradient,
        (parts_rules.LEFT,),
        5,
        "highest",
        only_with=parts_rules.LEFT,
    ),
    "critic_lost": Rule(
        "the critic has failed: its values do not predict the returns",
        parts_rules.critic_lost,
        ("critic/error_squared", "critic/explained_variance"),
        10,
        "lowest",
        only_with="critic/error_squared",
    ),
    "verifier_silent": Rule(
        "the verifier does not distinguish samples",
        parts_rules.verifier_silent,
        ("reward/max", "reward/min"),
        3,
        "highest",
    ),
    "reward_hacked": Rule(
        "the reward rises while the true objective falls: the policy hacks the reward",
        learning_rules.reward_hacked,
        ("reward/mean", VALIDATION, PART),
        1,
        "highest",
    ),
    "rows_memorised": Rule(
        "the training rows are memorised: their reward rises while the validation falls",
        learning_rules.rows_memorised,
        ("reward/mean", VALIDATION),
        1,
        "highest",
    ),
    "policy_collapsed": Rule(
        "the policy collapses: updates are too large",
        learning_rules.policy_collapsed,
        ("reward/mean", VALIDATION),
        1,
        "lowest",
    ),
    "entropy_collapsed": Rule(
        "entropy collapsed before the task was learned",
        learning_rules.entropy_collapsed,
        ("policy/entropy", "rollout/distinct_frac", "group/all_incorrect_frac", VALIDATION),
        3,
        "lowest",
    ),
    "entropy_lost": Rule(
        "entropy fell to almost nothing within ten updates: the learning rate is too large",
        learning_rules.entropy_lost,
        ("policy/entropy", "reward/mean"),
        2,
        "lowest",
    ),
    "data_solved": Rule(
        "the training rows are solved",
        learning_rules.data_solved,
        ("group/all_correct_frac", "group/degenerate_samples_frac"),
        10,
        "highest",
    ),
    "no_gradient": Rule(
        "almost no group has a gradient",
        learning_rules.no_gradient,
        ("group/all_incorrect_frac", "group/degenerate_samples_frac"),
        10,
        "highest",
    ),
    "gradient_spikes": Rule(
        "gradient norms spike repeatedly",
        learning_rules.gradient_spikes,
        ("optim/grad_norm", VALIDATION),
        1,
        "lowest",
    ),
}
"""Rules, the likeliest cause first: a later one may follow from an earlier one."""


def diagnose(curves: Curves, settings: Mapping[str, str]) -> Diagnosis:
    """Return the findings of all rules at the last row."""
    run, findings, cannot_tell = DiagnosedRun(curves, settings), [], {}
    for name, rule in RULES.items():
        if not len(curves) or (rule.only_with and not curves.has(rule.only_with)):
            continue
        if missing := [ADVICE.get(metric, metric) for metric in rule.needs if not run.measures(metric)]:
            cannot_tell[name] = f"needs {', '.join(missing)}"
        elif finding := _finding(run, name, rule):
            findings.append(_with_earlier(finding, findings))
    last = int(curves.steps[-1]) if len(curves) else -1
    return Diagnosis(last, findings, cannot_tell)


def _finding(run: DiagnosedRun, name: str, rule: Rule) -> Finding | None:
    signs, steps = rule.look(run), run.curves.steps
    first = standing(signs.present)
    if first is None or len(steps) - first < rule.rows:
        return None
    since, last = int(steps[first]), int(steps[-1])
    return Finding(name, rule.title, since, last, signs.evidence, signs.levers, list(signs.against))


def _with_earlier(finding: Finding, earlier: list[Finding]) -> Finding:
    """Add earlier findings to what speaks against this one."""
    for other in earlier:
        if other.since <= finding.since:
            finding.against.append(f"{other.rule} is present since step {other.since} and may cause this")
    return finding
