"""Write ledger.jsonl: the fate of each training prompt, one line per step, on disk before the step's
checkpoint.

| line | contains |
|---|---|
| start | attempt number; its first step, which undoes later steps of earlier attempts; prompts in flight |
| step | prompts trained on; those filtered or given up since the previous line; those in flight after it |

Prompts are indices, as ranges: `16-19,21`. `next` is the next index to admit: each smaller one is in exactly
one line that counts, or in flight in the last one. `mrl audit` proves that (mrl/report/audit.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mrl.observe.metrics_log import LoggedRows, append_lines

MOST_INDICES = 1 << 20
"""Most prompts of a kind in one line, because a file from elsewhere may contain anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightPrompts:
    """Prompts in flight, and prompts dropped since the last query without being trained on."""

    in_flight: Sequence[int]
    """Prompts admitted, and neither trained on nor dropped."""
    next_index: int
    """Index of the next prompt to admit."""
    filtered: Sequence[int] = ()
    given_up: Sequence[int] = ()


class LedgerLog:
    """Appends lines, complete on disk when a call returns; on a full disk, with the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []
        self.attempt = 0
        """Number of this start of the run, from 1; 0 before `start`."""

    def start(self, step: int, standing: InFlightPrompts) -> list[int]:
        """Begin an attempt with this step; return how many prompts each step that it undoes had trained."""
        _cut_torn_line(self._path)
        before, undone = _before(self._path, step)
        self.attempt = before + 1
        self._append({"start": self.attempt, "step": step} | _fields(standing))
        return undone

    def step(self, step: int, trained: Iterable[int], standing: InFlightPrompts) -> None:
        """Write the line of a trained step."""
        self._append({"step": step, "trained": ranges(trained)} | _fields(standing))

    def _append(self, line: dict[str, object]) -> None:
        self._unwritten.append(
            json.dumps({name: value for name, value in line.items() if value != ""}) + "\n"
        )
        if append_lines(self._path, self._unwritten):
            self._unwritten.clear()


def ranges(indices: Iterable[int]) -> str:
    """Return indices as text in ascending order, neighbours as first-last."""
    runs = itertools.groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])
    ends = [(pairs[0][1], pairs[-1][1]) for pairs in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def indices_of(text: str) -> list[int]:
    """Return the indices of a `ranges` text; raise ValueError for other text, or for too many prompts."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    spans = [range(int(first), int(last or first) + 1) for first, _, last in bounds]
    if sum(max(0, span.stop - span.start) for span in spans) > MOST_INDICES:
        raise ValueError(f"more than {MOST_INDICES} prompts in a line")
    return [index for span in spans for index in span]


def _fields(standing: InFlightPrompts) -> dict[str, object]:
    return {
        "next": standing.next_index,
        "filtered": ranges(standing.filtered),
        "given_up": ranges(standing.given_up),
        "on_the_way": ranges(standing.in_flight),
    }


def _cut_torn_line(path: Path) -> None:
    """Cut the half line that a dead machine may have left, because no line may follow it."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line) * line.endswith(b"\n")
    os.truncate(path, end)


def _before(path: Path, step: int) -> tuple[int, list[int]]:
    """Return the last attempt's number (0 for none), and the prompt counts of the steps from this one on."""
    attempt, trained = 0, []
    for line in LoggedRows(path):
        if isinstance(line.get("start"), int):
            attempt = int(line["start"])
            trained = [earlier for earlier in trained if earlier["step"] < line["step"]]
        elif line["step"] >= step:
            trained.append(line)
    return attempt, [_count(str(line.get("trained", ""))) for line in trained]


def _count(text: str) -> int:
    """Return the number of prompts in a `ranges` text; 0 if it is damaged."""
    try:
        return len(indices_of(text))
    except ValueError:
        return 0
