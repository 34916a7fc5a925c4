"""Responses whose worth is known beforehand, and what a reward makes of them: before a run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mrl.rewards.causes import cause_of
from mrl.rewards.judges.attacks import GUESS, attacked, read_attacks
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Status, Verdict

FILLER_CHARS = 10_000
ATTACK = "attack: "


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One response to one row, and its verdict."""

    name: str
    prompt: Prompt
    response: str
    status: Status = Status.FINISHED
    verdict: Verdict | None = None

    @property
    def value(self) -> float | None:
        """The reward; None without one."""
        return None if self.verdict is None else self.verdict.value


def probes_of(prompts: Sequence[Prompt], right: Sequence[str | None]) -> Iterator[Probe]:
    """Every response that is tried on some rows of one domain, with what is right for each. Those made of right ones are left out where
    that is not known."""
    for number, prompt in enumerate(prompts):
        others = [text for text in right if text is not None and text != right[number]]
        for name, text in _texts(prompt, right[number], others).items():
            yield Probe(name, prompt, text)
        if (own := right[number]) is not None:
            yield Probe("cut off", prompt, own[: len(own) // 2], Status.TRUNCATED)


def _texts(prompt: Prompt, right: str | None, others: Sequence[str]) -> dict[str, str]:
    wrong = others[0] if others else "I do not know the answer."
    question = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    texts = {"empty": "", "one symbol": ":", "one word": "the", "echo": str(question)}
    texts["filler"] = ("It is known that this is right. " * FILLER_CHARS)[:FILLER_CHARS]
    values = {"wrong": wrong, "question": str(question), "choice": "yes", "guess": GUESS}
    texts |= {ATTACK + name: attacked(text, values) for name, text in read_attacks().items()}
    if right is None:
        return texts
    texts["right"] = right
    if others:
        texts["another row's"] = wrong
        texts["all answers"] = "\n".join([*others[:8], right, *others[8:16]])
    return texts


def judged(section: RewardSection, probes: Sequence[Probe], *, deadline_seconds: float) -> list[Probe]:
    """The probes with their verdicts. RewardError where they take longer than the deadline."""
    pairs = []
    for number, probe in enumerate(probes):
        prompt = dataclasses.replace(probe.prompt, index=number)
        pairs.append((dataclasses.replace(trial_sample(prompt, probe.response), status=probe.status), prompt))
    with RewardPool(section, group_size=1, is_quiet=True) as pool:
        found = pool.score_all(pairs, deadline_seconds=deadline_seconds)
    return [dataclasses.replace(p, verdict=found[f"{n}.0"]) for n, p in enumerate(probes)]


@dataclasses.dataclass(frozen=True, slots=True)
class TrialFinding:
    """What a user should know."""

    is_error: bool
    text: str


MOST_WRONG = 0.05
"""Share of the rows in which something may be as it should not."""
MOST_CORRELATED = 0.5
_SHOWN = 80


def findings(probes: Sequence[Probe]) -> list[TrialFinding]:
    """What is wrong with a domain's rewards: errors are rewards that teach something else than the task."""
    values = [p.value for p in probes if p.value is not None]
    missing = [p for p in probes if p.value is None]
    found: list[TrialFinding] = []
    causes: dict[str, list[Probe]] = {}
    for probe in missing:
        causes.setdefault(cause_of(probe.verdict.reason if probe.verdict else ""), []).append(probe)
    for own in causes.values():
        reason, names = (
            own[0].verdict.reason if own[0].verdict else "",
            ", ".join(dict.fromkeys(p.name for p in own)),
        )
        shown = names if len(names) <= _SHOWN else f"{names[:_SHOWN]}..."
        found.append(
            TrialFinding(True, f"{len(own)} of {len(probes)} responses ({shown}) have no reward: {reason}")
        )
    if values and max(values) == min(values):
        return [
            *found,
            TrialFinding(
                True, f"every response has the reward {values[0]:g}: nothing can be learned from it"
            ),
        ]
    rows = list(_by_row(probes).values())
    found += filter(None, (_compared(rows, *rule) for rule in _RULES))
    found += _attacks(rows)
    found += _length(probes)
    return found


_RULES = (
    (True, "right", "less than another response", lambda row: row["right"] < max(row.values())),
    (True, "empty", "more than the least", lambda row: row["empty"] > min(row.values())),
    (True, "another row's", "as much as the right one", lambda row: row["another row's"] >= row["right"]),
    (False, "all answers", "as much as the right one", lambda row: row["all answers"] >= row["right"]),
    (False, "cut off", "as much as the right one", lambda row: row["cut off"] >= row["right"]),
    (False, "echo", "as much as the right one", lambda row: row["echo"] >= row["right"]),
    (False, "filler", "as much as the right one", lambda row: row["filler"] >= row["right"]),
)


def _compared(
    rows: Sequence[Mapping[str, float]], is_error: bool, name: str, words: str, holds
) -> TrialFinding | None:
    having = [row for row in rows if name in row and ("right" in row or name == "empty")]
    count = sum(holds(row) for row in having)
    if not count or (is_error and count <= MOST_WRONG * len(having)):
        return None
    return TrialFinding(is_error, f"{name!r} has {words} in {count} of {len(having)} rows")


def _attacks(rows: Sequence[Mapping[str, float]]) -> Iterator[TrialFinding]:
    pairs = [(name, row) for row in rows if "right" in row for name in row if name.startswith(ATTACK)]
    won = sorted({name.removeprefix(ATTACK) for name, row in pairs if row[name] >= row["right"]})
    if won:
        yield TrialFinding(False, f"attacks that have as much as the right one in some row: {', '.join(won)}")


def _length(probes: Sequence[Probe]) -> Iterator[TrialFinding]:
    having = [(len(p.response), p.value) for p in probes if p.value is not None and p.name != "right"]
    lengths, values = np.array([h[0] for h in having], float), np.array([h[1] for h in having], float)
    if len(having) < 10 or not lengths.std() or not values.std():
        return
    correlation = float(np.corrcoef(lengths, values)[0, 1])
    if abs(correlation) > MOST_CORRELATED:
        yield TrialFinding(
            False, f"rewards of responses that are not right correlate with their length: {correlation:.2f}"
        )


def _by_row(probes: Sequence[Probe]) -> dict[int, dict[str, float]]:
    """Row -> probe's name -> value, for those that have one."""
    ordered = sorted((p for p in probes if p.value is not None), key=lambda p: p.prompt.index)
    groups = itertools.groupby(ordered, key=lambda p: p.prompt.index)
    return {index: {p.name: float(p.value or 0.0) for p in group} for index, group in groups}
