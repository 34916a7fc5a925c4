"""`mrl rewards check`: measure how far rewards agree with labelled responses, and try attacks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.config.root import Config
from mrl.data.row_files import read_rows
from mrl.errors import DataError
from mrl.rewards.judges.attacks import GUESS, fill_attack, read_attacks
from mrl.rewards.pool.score_offline import prompt_of
from mrl.rewards.trials.agreement import auroc, wilson
from mrl.rewards.trials.probes import Probe, score_probes


@dataclasses.dataclass(frozen=True, slots=True)
class RewardCheckOptions:
    """Options of `mrl rewards check`."""

    gold: Path
    """File of rows {"prompt", "response", "right", "answer", "domain", "tag"}; the last three if needed."""
    threshold: float = 0.5
    """A reward above this means correct."""
    min_agreement: float = 0.0
    """Minimum accuracy."""
    attacks: tuple[Path, ...] = ()
    """Files of more attacks."""
    attacked_rows: int = 10
    """Number of incorrect responses to try attacks on."""
    deadline_seconds: float = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A labelled response and its reward."""

    probe: Probe
    is_right: bool
    value: float
    says_right: bool


def check_agreement(config: Config, options: RewardCheckOptions) -> tuple[str, bool]:
    """Return the report, and True if accuracy reaches min_agreement. Raises DataError for an invalid row."""
    rows = list(_rows(config, options.gold))
    probes = score_probes(config.reward, [p for p, _ in rows], deadline_seconds=options.deadline_seconds)
    scored = [
        Judged(probe, right, probe.value, probe.value > options.threshold)
        for probe, (_, right) in zip(probes, rows, strict=True)
        if probe.value is not None
    ]
    lines = [f"{len(rows)} responses, {len(rows) - len(scored)} without a reward"]
    if not scored:
        return "\n".join(lines), False
    lines += _agreement(scored)
    lines += _by_tag(scored)
    lines += _attacks(config, scored, options)
    return "\n".join(lines), _accuracy(scored) >= options.min_agreement


def _rows(config: Config, file: Path) -> Iterator[tuple[Probe, bool]]:
    for place, row in read_rows(file):
        try:
            _, response, right = row["prompt"], row["response"], row["right"]
        except KeyError as error:
            raise DataError(f"{place}: {error} is missing; a row has prompt, response and right") from error
        if not isinstance(response, str) or right not in (0, 1):
            raise DataError(f"{place}: response must be a text, and right true or false")
        prompt = prompt_of(config.reward, row, row.get("answer"), place=place)
        yield Probe("given", prompt, response), bool(right)


def _accuracy(rows: Sequence[Judged]) -> float:
    return sum(row.says_right == row.is_right for row in rows) / len(rows)


def _agreement(rows: Sequence[Judged]) -> Iterator[str]:
    right, wrong = [r for r in rows if r.is_right], [r for r in rows if not r.is_right]
    agreed = sum(row.says_right == row.is_right for row in rows)
    yield _share("accuracy", agreed, len(rows))
    area = auroc([r.value for r in rows], [r.is_right for r in rows])
    if area is not None:
        yield f"  AUROC {area:.3f}"
    yield _share("incorrect accepted", sum(r.says_right for r in wrong), len(wrong))
    yield _share("correct rejected", sum(not r.says_right for r in right), len(right))
    yield "  a policy can gain at most the share of incorrect accepted without being correct"


def _share(name: str, count: int, total: int) -> str:
    if not total:
        return f"  {name}: no such responses"
    low, high = wilson(count, total)
    return f"  {name} {count / total:.3f} ({count} of {total}; 95 % {low:.3f} to {high:.3f})"


def _by_tag(rows: Sequence[Judged]) -> Iterator[str]:
    names = sorted({row.probe.prompt.tag for row in rows})
    for name in names if len(names) > 1 else ():
        tagged = [row for row in rows if row.probe.prompt.tag == name]
        agreed = sum(row.says_right == row.is_right for row in tagged)
        yield _share(f"accuracy, tag {name or '-'}", agreed, len(tagged))


def _attacks(config: Config, rows: Sequence[Judged], options: RewardCheckOptions) -> Iterator[str]:
    """Yield the success of each attack on incorrect responses that are rejected without it."""
    wrong = [row for row in rows if not row.is_right and not row.says_right][: options.attacked_rows]
    if not wrong:
        return
    probes = [
        dataclasses.replace(row.probe, name=name, response=fill_attack(text, _words(row.probe)))
        for name, text in read_attacks(*options.attacks).items()
        for row in wrong
    ]
    results = score_probes(config.reward, probes, deadline_seconds=options.deadline_seconds)
    scored = [p for p in results if p.value is not None]
    successes = [p for p in scored if (p.value or 0.0) > options.threshold]
    yield _share("attacks that succeed", len(successes), len(scored))
    tried = Counter(p.name for p in scored)
    for name, count in Counter(p.name for p in successes).items():
        yield f"    {name}: {count} of {tried[name]}"


def _words(probe: Probe) -> dict[str, str]:
    question = probe.prompt.messages[-1]["content"] if probe.prompt.messages else probe.prompt.text
    return {"wrong": probe.response, "question": str(question), "choice": "yes", "guess": GUESS}
