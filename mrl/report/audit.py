"""`mrl audit RUN`: check from a run's folder alone that each prompt was trained once, dropped once, or is in
flight.

Read ledger.jsonl (mrl/observe/ledger_log.py) to its end, without what a later attempt undid. From line to
line, prompts in flight and newly admitted ones must have ended exactly once or still be in flight.
metrics.jsonl and samples.jsonl must agree.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from mrl.errors import DataError
from mrl.observe.ledger_log import MOST_INDICES, indices_of, ranges
from mrl.report.log_rows import ReadSummary, read_log_rows

ENDS = ("trained", "filtered", "given_up")


@dataclasses.dataclass(frozen=True, slots=True)
class _LedgerLine:
    """Line of ledger.jsonl."""

    attempt: int
    step: int
    starts: bool
    next_index: int
    ranges: dict[str, str]
    """Prompts as ranges: those that ended with this line, by how they ended, and those in flight."""

    def __getitem__(self, name: str) -> list[int]:
        """Return the prompts of one of ENDS, or of on_the_way."""
        return indices_of(self.ranges.get(name, ""))

    def ended(self) -> list[int]:
        """Return all prompts that ended with this line."""
        return [index for name in ENDS for index in self[name]]

    @property
    def place(self) -> str:
        """Place of the line, for people."""
        return f"{'the start at ' * self.starts}step {self.step} of attempt {self.attempt}"


@dataclasses.dataclass(slots=True)
class Audit:
    """Result of an audit."""

    lines: list[_LedgerLine] = dataclasses.field(default_factory=list)
    """Lines that count, in order."""
    undone: list[_LedgerLine] = dataclasses.field(default_factory=list)
    """Lines of steps that a later attempt repeated."""
    attempts: int = 0
    num_bytes: int = 0
    twice: dict[int, str] = dataclasses.field(default_factory=dict)
    """Prompt -> line in which it ended although it had ended before or was never admitted."""
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    """Prompt -> line after which it had neither ended nor was in flight."""
    other: list[str] = dataclasses.field(default_factory=list)
    """Other disagreements, as sentences."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Checks that were not possible, as sentences."""

    @property
    def passes(self) -> bool:
        return not (self.twice or self.skipped or self.other)


def audit(folder: Path) -> Audit:
    """Audit a run folder; raise DataError if it has no readable ledger.jsonl."""
    result, path = Audit(), folder / "ledger.jsonl"
    reading = ReadSummary(path.name)
    ledger = list(_lines(path, reading))
    if not ledger:
        if _is_tuned(folder):
            raise DataError(
                f"{folder} was written by `mrl tune`, which trains on rows and has no ledger to audit; use "
                "`mrl report` for its curves"
            )
        raise DataError(
            f"{folder}: {' '.join(reading.notes()) or 'ledger.jsonl has no start.'} It is written from a "
            "run's first step; a run of an earlier version cannot be audited, because samples.jsonl contains "
            "only some samples"
        )
    result.notes += reading.notes()
    result.num_bytes, result.attempts = path.stat().st_size, ledger[-1].attempt
    for line in ledger:
        while line.starts and result.lines and result.lines[-1].step >= line.step:
            result.undone.append(result.lines.pop())
        result.lines.append(line)
    _follow(result)
    _compare_metrics(folder, result)
    _compare_samples(folder, result)
    return result


def _is_tuned(folder: Path) -> bool:
    """Return True if `mrl tune` wrote the folder, and `mrl train` did not."""
    return folder.resolve().name == "tune" or (
        (folder / "tune").is_dir() and not (folder / "metrics.jsonl").exists()
    )


def _lines(path: Path, reading: ReadSummary) -> Iterator[_LedgerLine]:
    attempt, last = 0, None
    for row in read_log_rows(path, reading):
        try:
            number = int(row.get("start", attempt))
            prompts = {name: row[name] for name in (*ENDS, "on_the_way") if name in row}
            line = _LedgerLine(number, int(row["step"]), "start" in row, int(row["next"]), prompts)
            for name in prompts:
                line[name]
            if last is not None and line.next_index > last + MOST_INDICES:
                raise ValueError(f"{line.next_index - last} prompts admitted at once")
        except (KeyError, TypeError, ValueError, AttributeError):
            reading.pass_over()
            continue
        attempt, last = number, line.next_index
        if not attempt:
            raise DataError(f"{path}:{reading.lines}: a step precedes the run's first start line")
        yield line


def _follow(result: Audit) -> None:
    """Check each line against the one before."""
    first = result.lines[0]
    next_index, on_the_way, step = first.next_index, set(first["on_the_way"]), first.step - 1
    if step:
        result.notes.append(
            f"The run had {step} steps before ledger.jsonl: the {next_index - len(on_the_way)} prompts that "
            "had ended by then are only known not to recur."
        )
    for line in result.lines:
        if line.step != step + 1:
            result.notes.append(f"ledger.jsonl has no lines for steps {step + 1} to {line.step - 1}.")
        step = line.step - line.starts
        ended, still = line.ended(), set(line["on_the_way"])
        awaited = on_the_way.union(range(next_index, line.next_index))
        times = collections.Counter(ended)
        again = {index for index in times if times[index] > 1 or index not in awaited or index in still}
        for index in again | (still - awaited):
            result.twice.setdefault(index, line.place)
        for index in awaited.difference(ended) - still:
            result.skipped.setdefault(index, line.place)
        next_index, on_the_way = line.next_index, still


def _compare_metrics(folder: Path, result: Audit) -> None:
    """Check that each step trained as many groups as its row in metrics.jsonl says."""
    reading, agree, last = ReadSummary("metrics.jsonl"), 0, result.lines[-1]
    trained = _trained(result.lines)
    for row in read_log_rows(folder / reading.name, reading):
        step, groups = row.get("step"), row.get("rollout/groups")
        if groups is None or not isinstance(step, int):
            continue
        if isinstance(groups, bool) or not isinstance(groups, int | float):
            result.other.append(f"metrics.jsonl has no number of groups in step {step}.")
            continue
        if step > last.step - last.starts:
            result.other.append(
                f"metrics.jsonl has step {step}, but ledger.jsonl ends before it: it was cut."
            )
        elif step in trained and groups != (count := len(indices_of(trained[step]))):
            result.other.append(
                f"step {step} trained {groups:g} groups by metrics.jsonl, but {count} by ledger.jsonl."
            )
        else:
            agree += step in trained
    result.notes += reading.notes()
    result.notes.append(f"{agree} rows of metrics.jsonl agree.")


def _compare_samples(folder: Path, result: Audit) -> None:
    """Check that each sample in samples.jsonl is of a prompt that its step trained."""
    reading, agree, undone = ReadSummary("samples.jsonl"), 0, 0
    trained, before = (_trained(lines) for lines in (result.lines, result.undone))
    for row in read_log_rows(folder / reading.name, reading):
        step, index = row.get("step"), str(row.get("sample_id")).split(".")[0]
        if row.get("kind") != "train" or not isinstance(step, int) or not index.isdecimal():
            continue
        if int(index) in _members(trained.get(step, "")):
            agree += 1
        elif step not in trained or int(index) in _members(before.get(step, "")):
            undone += 1
        else:
            result.other.append(
                f"samples.jsonl has prompt {index} in step {step}, which did not train on it."
            )
    result.notes += reading.notes()
    result.notes.append(f"{agree} samples of samples.jsonl agree, {undone} are from undone steps.")


def _trained(lines: Iterable[_LedgerLine]) -> dict[int, str]:
    """Return the prompts of each step, as ranges, over all attempts."""
    by_step: dict[int, str] = {}
    for line in lines:
        if not line.starts:
            by_step[line.step] = f"{by_step.get(line.step, '')},{line.ranges.get('trained', '')}"
    return by_step


@functools.lru_cache(maxsize=16)
def _members(text: str) -> frozenset[int]:
    return frozenset(indices_of(text))


# -- text --------------------------------------------------------------------------------------------------


def audit_text(result: Audit) -> str:
    """Return the verdict, with the prompts, steps and attempts of each violation."""
    last, counts = result.lines[-1], collections.Counter[str]()
    for line in result.lines:
        counts.update({end: len(line[end]) for end in ENDS})
    steps = sum(not line.starts for line in result.lines)
    again = sum(not line.starts for line in result.undone)
    ends = ", ".join(f"{name.replace('_', ' ')} {counts[name]}" for name in ENDS)
    lines = [
        f"{steps} steps in {result.attempts} starts; {again} more steps were undone and repeated by a later "
        "start",
        f"{last.next_index} prompts admitted: {ends}, in flight {len(last['on_the_way'])}",
        f"twice {len(result.twice)}, skipped {len(result.skipped)}",
        *_listed("twice", result.twice, result),
        *_listed("skipped", result.skipped, result),
        *result.other[:MOST],
        *result.notes,
        f"ledger.jsonl has {result.num_bytes} bytes, {result.num_bytes / max(1, last.next_index):.1f} per "
        "prompt.",
    ]
    return "\n".join(lines)


MOST = 20
"""Most prompts that are listed one by one."""


def _listed(name: str, prompts: dict[int, str], result: Audit) -> Iterator[str]:
    for index in sorted(prompts)[:MOST]:
        places = [f"{end.replace('_', ' ')} in {line.place}" for line, end in _ends_of(index, result.lines)]
        yield f"  prompt {index} {name}, seen in {prompts[index]}: {'; '.join(places) or 'it never ended'}"
    if len(prompts) > MOST:
        yield f"  and others: {ranges(sorted(prompts)[MOST:])}"


def _ends_of(index: int, lines: Iterable[_LedgerLine]) -> Iterator[tuple[_LedgerLine, str]]:
    for line in lines:
        yield from ((line, end) for end in ENDS for prompt in line[end] if prompt == index)
