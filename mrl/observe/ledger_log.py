"""ledger.jsonl: what became of each training prompt, a line a step, on disk before the step's checkpoint.

| line | says |
|---|---|
| start | number of the attempt; the step it begins with, which undoes that step and all later ones of attempts before; the prompts that were on their way in the checkpoint |
| step | the prompts it trained on; those filtered or given up since the line before; those on their way after it |

Prompts are told by index, as ranges: `16-19,21`. `next` is the index that is admitted next: each one below it stands in one line
that counts, or is on its way in the last. `mrl audit` proves that (mrl/report/audit.py).
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
"""Prompts that one line may have of a kind: a file of somebody else says what it likes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where the prompts of a run are, and which left since that was last asked without being trained on."""

    on_the_way: Sequence[int]
    """Admitted, and neither trained on nor dropped."""
    next_index: int
    """Of the prompt that is admitted next."""
    filtered: Sequence[int] = ()
    given_up: Sequence[int] = ()


class LedgerLog:
    """Appends lines, which are complete on disk when a call returns, unless the disk is full; then with the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []
        self.attempt = 0
        """Which start of the run this is, from 1; 0 before `start`."""

    def start(self, step: int, standing: Standing) -> list[int]:
        """An attempt begins with this step; how many prompts each of the steps had trained which it undoes."""
        _cut_torn_line(self._path)
        before, undone = _before(self._path, step)
        self.attempt = before + 1
        self._append({"start": self.attempt, "step": step} | _told(standing))
        return undone

    def step(self, step: int, trained: Iterable[int], standing: Standing) -> None:
        """A step was trained."""
        self._append({"step": step, "trained": ranges(trained)} | _told(standing))

    def _append(self, line: dict[str, object]) -> None:
        self._unwritten.append(
            json.dumps({name: value for name, value in line.items() if value != ""}) + "\n"
        )
        if append_lines(self._path, self._unwritten):
            self._unwritten.clear()


def ranges(indices: Iterable[int]) -> str:
    """Indices in ascending order as text, neighbours as first-last."""
    runs = itertools.groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])
    ends = [(own[0][1], own[-1][1]) for own in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def indices_of(text: str) -> list[int]:
    """The indices that `ranges` told; ValueError for another text, and for one of more prompts than a line can have."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    spans = [range(int(first), int(last or first) + 1) for first, _, last in bounds]
    if sum(max(0, span.stop - span.start) for span in spans) > MOST_INDICES:
        raise ValueError(f"more than {MOST_INDICES} prompts in a line")
    return [index for span in spans for index in span]


def _told(standing: Standing) -> dict[str, object]:
    return {
        "next": standing.next_index,
        "filtered": ranges(standing.filtered),
        "given_up": ranges(standing.given_up),
        "on_the_way": ranges(standing.on_the_way),
    }


def _cut_torn_line(path: Path) -> None:
    """A machine that died may have left half a line, behind which no other may stand."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line) * line.endswith(b"\n")
    os.truncate(path, end)


def _before(path: Path, step: int) -> tuple[int, list[int]]:
    """The number of the last attempt, 0 for none, and how many prompts its steps, and those before, had from this one on."""
    attempt, trained = 0, []
    for line in LoggedRows(path):
        if isinstance(line.get("start"), int):
            attempt = int(line["start"])
            trained = [before for before in trained if before["step"] < line["step"]]
        elif line["step"] >= step:
            trained.append(line)
    return attempt, [_count(str(line.get("trained", ""))) for line in trained]


def _count(told: str) -> int:
    """Of the prompts that ranges told; 0 where the line is damaged."""
    try:
        return len(indices_of(told))
    except ValueError:
        return 0
