"""The table of rules, and a diagnosis by them. Pure: rows and settings in, findings out."""

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
    PART: "the truth as the first of several parts of the reward, which validation then reads",
    "rollout/distinct_frac": "loop.samples_per_prompt above 1, and a run of this version",
}
"""How a run gets a metric that it lacks, where a sentence is needed."""


class Rule(NamedTuple):
    """What one kind of failure looks like."""

    title: str
    look: Callable[[DiagnosedRun], Signs]
    needs: tuple[str, ...]
    """Metrics without which it cannot tell."""
    rows: int
    """Rows in a row that its signs must stand."""
    samples: str
    """Which samples show it: the highest or the lowest rewards of the last steps."""
    only_with: str = ""
    """A metric without which the run has nothing that could fail so."""


RULES = {
    "engines_apart": Rule(
        "engines and trainer are apart: tokens are drawn from other weights than those that are trained",
        parts_rules.engines_apart,
        (parts_rules.MISMATCH,),
        3,
        "lowest",
    ),
    "correction_takes_gradient": Rule(
        "the correction takes most of the gradient: its weights leave little to learn from",
        parts_rules.correction_takes_gradient,
        (parts_rules.LEFT,),
        5,
        "highest",
        only_with=parts_rules.LEFT,
    ),
    "critic_lost": Rule(
        "the critic is lost: its values say nothing about the returns",
        parts_rules.critic_lost,
        ("critic/error_squared", "critic/explained_variance"),
        10,
        "lowest",
        only_with="critic/error_squared",
    ),
    "verifier_silent": Rule(
        "the verifier tells samples not apart",
        parts_rules.verifier_silent,
        ("reward/max", "reward/min"),
        3,
        "highest",
    ),
    "reward_hacked": Rule(
        "the reward rises and the truth falls: the policy found a way round the reward",
        learning_rules.reward_hacked,
        ("reward/mean", VALIDATION, PART),
        1,
        "highest",
    ),
    "rows_memorised": Rule(
        "the training rows are learned by heart: their reward rises and the validation falls",
        learning_rules.rows_memorised,
        ("reward/mean", VALIDATION),
        1,
        "highest",
    ),
    "policy_collapsed": Rule(
        "the policy unlearns what it knew: updates are too large",
        learning_rules.policy_collapsed,
        ("reward/mean", VALIDATION),
        1,
        "lowest",
    ),
    "entropy_collapsed": Rule(
        "entropy collapsed before the task was learned",
        learning_rules.entropy_collapsed,
        ("policy/entropy", "rollout/distinct_frac", "group/all_wrong_frac", VALIDATION),
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
        "nearly no group has a gradient",
        learning_rules.no_gradient,
        ("group/all_wrong_frac", "group/degenerate_samples_frac"),
        10,
        "highest",
    ),
    "gradient_spikes": Rule(
        "gradients are far above the usual again and again",
        learning_rules.gradient_spikes,
        ("optim/grad_norm", VALIDATION),
        1,
        "lowest",
    ),
}
"""The likeliest cause first: what stands below may follow from what stands above."""


def diagnose(curves: Curves, settings: Mapping[str, str]) -> Diagnosis:
    """The findings of all rules at the last row."""
    run, findings, cannot_tell = DiagnosedRun(curves, settings), [], {}
    for name, rule in RULES.items():
        if not len(curves) or (rule.only_with and not curves.has(rule.only_with)):
            continue
        if missing := [ADVICE.get(metric, metric) for metric in rule.needs if not run.measures(metric)]:
            cannot_tell[name] = f"needs {', '.join(missing)}"
        elif finding := _finding(run, name, rule):
            findings.append(_told_of_earlier(finding, findings))
    last = int(curves.steps[-1]) if len(curves) else -1
    return Diagnosis(last, findings, cannot_tell)


def _finding(run: DiagnosedRun, name: str, rule: Rule) -> Finding | None:
    signs, steps = rule.look(run), run.curves.steps
    first = standing(signs.sick)
    if first is None or len(steps) - first < rule.rows:
        return None
    since, last = int(steps[first]), int(steps[-1])
    return Finding(name, rule.title, since, last, signs.evidence, signs.levers, list(signs.against))


def _told_of_earlier(finding: Finding, earlier: list[Finding]) -> Finding:
    """With the findings that began before it among what speaks against it."""
    for other in earlier:
        if other.since <= finding.since:
            finding.against.append(f"{other.rule} stands since step {other.since}: this may follow from it")
    return finding
