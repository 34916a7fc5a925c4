"""`mrl audit RUN`: from a run's folder alone, whether each prompt was trained once, dropped once, or is on its way.

ledger.jsonl (mrl/observe/ledger_log.py) is read to its end; what a later attempt undid does not count. From line to line, what was on
its way and what was admitted must have ended once, or be on its way still. Then metrics.jsonl and samples.jsonl must agree with it.
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
    """A line of ledger.jsonl."""

    attempt: int
    step: int
    starts: bool
    next_index: int
    told: dict[str, str]
    """Prompts as ranges: those that ended with this line, by how, and those on their way."""

    def __getitem__(self, name: str) -> list[int]:
        """One of ENDS, or on_the_way."""
        return indices_of(self.told.get(name, ""))

    def ended(self) -> list[int]:
        """All that ended with this line."""
        return [index for name in ENDS for index in self[name]]

    @property
    def place(self) -> str:
        """For people."""
        return f"{'the start at ' * self.starts}step {self.step} of attempt {self.attempt}"


@dataclasses.dataclass(slots=True)
class Audit:
    """What was found."""

    lines: list[_LedgerLine] = dataclasses.field(default_factory=list)
    """Those that count, in order."""
    undone: list[_LedgerLine] = dataclasses.field(default_factory=list)
    """Of steps that a later attempt made again."""
    attempts: int = 0
    num_bytes: int = 0
    twice: dict[int, str] = dataclasses.field(default_factory=dict)
    """Where prompts ended that had ended before, or were never admitted."""
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    """Where prompts were lost that had neither ended nor are on their way."""
    other: list[str] = dataclasses.field(default_factory=list)
    """What else does not agree: sentences."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What could not be looked at: sentences."""

    @property
    def holds(self) -> bool:
        return not (self.twice or self.skipped or self.other)


def audit(folder: Path) -> Audit:
    """Reads a run folder. DataError where it has no ledger.jsonl, or none that can be read."""
    found, path = Audit(), folder / "ledger.jsonl"
    reading = ReadSummary(path.name)
    read = list(_lines(path, reading))
    if not read:
        if _is_tuned(folder):
            raise DataError(
                f"{folder} is of mrl tune, which learns rows and asks no prompts: there is no ledger to audit; "
                "mrl report shows its curves"
            )
        raise DataError(
            f"{folder}: {' '.join(reading.notes()) or 'ledger.jsonl has no start.'} It is written from a run's first step; of a run "
            "of an earlier version nothing can be proven, because samples.jsonl holds only some of the samples"
        )
    found.notes += reading.notes()
    found.num_bytes, found.attempts = path.stat().st_size, read[-1].attempt
    for line in read:
        while line.starts and found.lines and found.lines[-1].step >= line.step:
            found.undone.append(found.lines.pop())
        found.lines.append(line)
    _follow(found)
    _compare_metrics(folder, found)
    _compare_samples(folder, found)
    return found


def _is_tuned(folder: Path) -> bool:
    """Whether `mrl tune` wrote it, and `mrl train` did not."""
    return folder.resolve().name == "tune" or (
        (folder / "tune").is_dir() and not (folder / "metrics.jsonl").exists()
    )


def _lines(path: Path, reading: ReadSummary) -> Iterator[_LedgerLine]:
    attempt, last = 0, None
    for row in read_log_rows(path, reading):
        try:
            number = int(row.get("start", attempt))
            told = {name: row[name] for name in (*ENDS, "on_the_way") if name in row}
            line = _LedgerLine(number, int(row["step"]), "start" in row, int(row["next"]), told)
            for name in told:
                line[name]
            if last is not None and line.next_index > last + MOST_INDICES:
                raise ValueError(f"{line.next_index - last} prompts admitted at once")
        except (KeyError, TypeError, ValueError, AttributeError):
            reading.pass_over()
            continue
        attempt, last = number, line.next_index
        if not attempt:
            raise DataError(f"{path}, line {reading.lines}: a step stands before the first start of the run")
        yield line


def _follow(found: Audit) -> None:
    """Holds each line against the one before."""
    first = found.lines[0]
    next_index, on_the_way, step = first.next_index, set(first["on_the_way"]), first.step - 1
    if step:
        found.notes.append(
            f"The run had {step} steps before ledger.jsonl: of the {next_index - len(on_the_way)} prompts that had ended by then "
            "nothing is known but that they did not come again."
        )
    for line in found.lines:
        if line.step != step + 1:
            found.notes.append(f"ledger.jsonl has no line of the steps {step + 1} to {line.step - 1}.")
        step = line.step - line.starts
        ended, still = line.ended(), set(line["on_the_way"])
        awaited = on_the_way.union(range(next_index, line.next_index))
        times = collections.Counter(ended)
        again = {index for index in times if times[index] > 1 or index not in awaited or index in still}
        for index in again | (still - awaited):
            found.twice.setdefault(index, line.place)
        for index in awaited.difference(ended) - still:
            found.skipped.setdefault(index, line.place)
        next_index, on_the_way = line.next_index, still


def _compare_metrics(folder: Path, found: Audit) -> None:
    """Whether each step trained as many groups as its row says."""
    reading, agree, last = ReadSummary("metrics.jsonl"), 0, found.lines[-1]
    trained = _trained(found.lines)
    for row in read_log_rows(folder / reading.name, reading):
        step, groups = row.get("step"), row.get("rollout/groups")
        if groups is None or not isinstance(step, int):
            continue
        if isinstance(groups, bool) or not isinstance(groups, int | float):
            found.other.append(f"metrics.jsonl has no number of groups in step {step}.")
            continue
        if step > last.step - last.starts:
            found.other.append(f"metrics.jsonl has step {step}, ledger.jsonl ends before it: it was cut.")
        elif step in trained and groups != (count := len(indices_of(trained[step]))):
            found.other.append(
                f"step {step} trained {groups:g} groups by metrics.jsonl, {count} by ledger.jsonl."
            )
        else:
            agree += step in trained
    found.notes += reading.notes()
    found.notes.append(f"{agree} rows of metrics.jsonl agree.")


def _compare_samples(folder: Path, found: Audit) -> None:
    """Whether each sample that was written down is of a prompt that its step trained."""
    reading, agree, undone = ReadSummary("samples.jsonl"), 0, 0
    trained, before = (_trained(lines) for lines in (found.lines, found.undone))
    for row in read_log_rows(folder / reading.name, reading):
        step, index = row.get("step"), str(row.get("sample_id")).split(".")[0]
        if row.get("kind") != "train" or not isinstance(step, int) or not index.isdecimal():
            continue
        if int(index) in _members(trained.get(step, "")):
            agree += 1
        elif step not in trained or int(index) in _members(before.get(step, "")):
            undone += 1
        else:
            found.other.append(f"samples.jsonl has prompt {index} in step {step}, which did not train it.")
    found.notes += reading.notes()
    found.notes.append(f"{agree} samples of samples.jsonl agree, {undone} are of steps that were undone.")


def _trained(lines: Iterable[_LedgerLine]) -> dict[int, str]:
    """The prompts of each step, as ranges; of all attempts that made it."""
    told: dict[int, str] = {}
    for line in lines:
        if not line.starts:
            told[line.step] = f"{told.get(line.step, '')},{line.told.get('trained', '')}"
    return told


@functools.lru_cache(maxsize=16)
def _members(told: str) -> frozenset[int]:
    return frozenset(indices_of(told))


# -- for people ------------------------------------------------------------------------------------------------------


def audit_text(found: Audit) -> str:
    """The verdict, with the prompts, steps and attempts of what does not hold."""
    last, counts = found.lines[-1], collections.Counter[str]()
    for line in found.lines:
        counts.update({end: len(line[end]) for end in ENDS})
    steps = sum(not line.starts for line in found.lines)
    again = sum(not line.starts for line in found.undone)
    ends = ", ".join(f"{name.replace('_', ' ')} {counts[name]}" for name in ENDS)
    said = [
        f"{steps} steps in {found.attempts} starts; {again} further steps were undone by a later start and made again",
        f"{last.next_index} prompts admitted: {ends}, on their way {len(last['on_the_way'])}",
        f"twice {len(found.twice)}, skipped {len(found.skipped)}",
        *_told("twice", found.twice, found),
        *_told("skipped", found.skipped, found),
        *found.other[:MOST],
        *found.notes,
        f"ledger.jsonl has {found.num_bytes} bytes, {found.num_bytes / max(1, last.next_index):.1f} a prompt.",
    ]
    return "\n".join(said)


MOST = 20
"""Prompts that are told one by one."""


def _told(name: str, found: dict[int, str], of: Audit) -> Iterator[str]:
    for index in sorted(found)[:MOST]:
        places = [f"{end.replace('_', ' ')} in {line.place}" for line, end in _ends_of(index, of.lines)]
        yield f"  prompt {index} {name}, seen in {found[index]}: {'; '.join(places) or 'it ended nowhere'}"
    if len(found) > MOST:
        yield f"  and others: {ranges(sorted(found)[MOST:])}"


def _ends_of(index: int, lines: Iterable[_LedgerLine]) -> Iterator[tuple[_LedgerLine, str]]:
    for line in lines:
        yield from ((line, end) for end in ENDS for each in line[end] if each == index)
