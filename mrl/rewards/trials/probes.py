"""Probe a reward before a run: score responses whose worth is known, and report what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mrl.rewards.causes import cause_of
from mrl.rewards.judges.attacks import GUESS, fill_attack, read_attacks
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Status, Verdict

FILLER_CHARS = 10_000
ATTACK = "attack: "


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Test response to one row, and its verdict."""

    name: str
    prompt: Prompt
    response: str
    status: Status = Status.FINISHED
    verdict: Verdict | None = None

    @property
    def value(self) -> float | None:
        """Reward; None without one."""
        return None if self.verdict is None else self.verdict.value


def probes_of(prompts: Sequence[Prompt], right: Sequence[str | None]) -> Iterator[Probe]:
    """Yield the probes of one domain's rows. `right` has one correct response per row; if it is None, probes
    that need it are left out."""
    for number, prompt in enumerate(prompts):
        others = [text for text in right if text is not None and text != right[number]]
        for name, text in _texts(prompt, right[number], others).items():
            yield Probe(name, prompt, text)
        if (correct := right[number]) is not None:
            yield Probe("cut off", prompt, correct[: len(correct) // 2], Status.TRUNCATED)


def _texts(prompt: Prompt, right: str | None, others: Sequence[str]) -> dict[str, str]:
    wrong = others[0] if others else "I do not know the answer."
    question = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    texts = {"empty": "", "one symbol": ":", "one word": "the", "echo": str(question)}
    texts["filler"] = ("It is known that this is right. " * FILLER_CHARS)[:FILLER_CHARS]
    values = {"wrong": wrong, "question": str(question), "choice": "yes", "guess": GUESS}
    texts |= {ATTACK + name: fill_attack(text, values) for name, text in read_attacks().items()}
    if right is None:
        return texts
    texts["right"] = right
    if others:
        texts["another row's"] = wrong
        texts["all answers"] = "\n".join([*others[:8], right, *others[8:16]])
    return texts


def score_probes(section: RewardSection, probes: Sequence[Probe], *, deadline_seconds: float) -> list[Probe]:
    """Return the probes with their verdicts. Raises RewardError if they take longer than the deadline."""
    pairs = []
    for number, probe in enumerate(probes):
        prompt = dataclasses.replace(probe.prompt, index=number)
        pairs.append((dataclasses.replace(trial_sample(prompt, probe.response), status=probe.status), prompt))
    with RewardPool(section, group_size=1, is_quiet=True) as pool:
        verdicts = pool.score_all(pairs, deadline_seconds=deadline_seconds)
    return [dataclasses.replace(p, verdict=verdicts[f"{n}.0"]) for n, p in enumerate(probes)]


@dataclasses.dataclass(frozen=True, slots=True)
class TrialFinding:
    """Error or warning about a reward, for the user."""

    is_error: bool
    text: str


MAX_VIOLATION_SHARE = 0.05
"""Share of the rows in which an error rule may be violated."""
MAX_LENGTH_CORRELATION = 0.5
_SHOWN = 80


def findings(probes: Sequence[Probe]) -> list[TrialFinding]:
    """Return what is wrong with a domain's rewards; an error means that they do not teach the task."""
    values = [p.value for p in probes if p.value is not None]
    missing = [p for p in probes if p.value is None]
    results: list[TrialFinding] = []
    causes: dict[str, list[Probe]] = {}
    for probe in missing:
        causes.setdefault(cause_of(probe.verdict.reason if probe.verdict else ""), []).append(probe)
    for failed in causes.values():
        reason, names = (
            failed[0].verdict.reason if failed[0].verdict else "",
            ", ".join(dict.fromkeys(p.name for p in failed)),
        )
        shown = names if len(names) <= _SHOWN else f"{names[:_SHOWN]}..."
        results.append(
            TrialFinding(True, f"{len(failed)} of {len(probes)} responses ({shown}) have no reward: {reason}")
        )
    if values and max(values) == min(values):
        return [
            *results,
            TrialFinding(
                True, f"every response has the reward {values[0]:g}; nothing can be learned from it"
            ),
        ]
    rows = list(_by_row(probes).values())
    results += filter(None, (_compared(rows, *rule) for rule in _RULES))
    results += _attacks(rows)
    results += _length(probes)
    return results


_RULES = (
    (True, "right", "lower than another response", lambda row: row["right"] < max(row.values())),
    (True, "empty", "above the lowest reward", lambda row: row["empty"] > min(row.values())),
    (True, "another row's", "as high as the correct one", lambda row: row["another row's"] >= row["right"]),
    (False, "all answers", "as high as the correct one", lambda row: row["all answers"] >= row["right"]),
    (False, "cut off", "as high as the correct one", lambda row: row["cut off"] >= row["right"]),
    (False, "echo", "as high as the correct one", lambda row: row["echo"] >= row["right"]),
    (False, "filler", "as high as the correct one", lambda row: row["filler"] >= row["right"]),
)


def _compared(
    rows: Sequence[Mapping[str, float]], is_error: bool, name: str, comparison: str, violates
) -> TrialFinding | None:
    compared = [row for row in rows if name in row and ("right" in row or name == "empty")]
    count = sum(violates(row) for row in compared)
    if not count or (is_error and count <= MAX_VIOLATION_SHARE * len(compared)):
        return None
    return TrialFinding(is_error, f"{name!r} scores {comparison} in {count} of {len(compared)} rows")


def _attacks(rows: Sequence[Mapping[str, float]]) -> Iterator[TrialFinding]:
    pairs = [(name, row) for row in rows if "right" in row for name in row if name.startswith(ATTACK)]
    successful = sorted({name.removeprefix(ATTACK) for name, row in pairs if row[name] >= row["right"]})
    if successful:
        yield TrialFinding(
            False, f"attacks scoring as high as the correct one in some row: {', '.join(successful)}"
        )


def _length(probes: Sequence[Probe]) -> Iterator[TrialFinding]:
    pairs = [(len(p.response), p.value) for p in probes if p.value is not None and p.name != "right"]
    lengths, values = np.array([xy[0] for xy in pairs], float), np.array([xy[1] for xy in pairs], float)
    if len(pairs) < 10 or not lengths.std() or not values.std():
        return
    correlation = float(np.corrcoef(lengths, values)[0, 1])
    if abs(correlation) > MAX_LENGTH_CORRELATION:
        yield TrialFinding(
            False, f"rewards of incorrect responses correlate with their length: {correlation:.2f}"
        )


def _by_row(probes: Sequence[Probe]) -> dict[int, dict[str, float]]:
    """Return row -> probe name -> value, for the probes that have a value."""
    ordered = sorted((p for p in probes if p.value is not None), key=lambda p: p.prompt.index)
    groups = itertools.groupby(ordered, key=lambda p: p.prompt.index)
    return {index: {p.name: float(p.value or 0.0) for p in group} for index, group in groups}
