"""Report a soak from its files: each fault's outcome, leftovers, growth, and equality of the weights."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak.disturbed import SAVE_FAILED
from benchmarks.soak.plan import Fault
from benchmarks.soak.slopes import Slope, slopes

MIB = float(1 << 20)
BOUNDS = {
    "memory": (4 * MIB, 0.01),
    "descriptors": (1.0, 0.01),
    "threads": (1.0, 0.01),
    "processes": (0.5, 0.0),
    "shared_memory/bytes": (MIB, 0.01),
    "shared_memory/files": (1.0, 0.0),
    "ray/bytes": (MIB, 0.01),
    "ray/files": (2.0, 0.0),
    "run": (float("inf"), 0.0),
}
"""Growth per 1,000 steps and per life that counts as flat: the larger of a number and a share of the median.
The run folder may grow: it collects rows, samples and logs."""
ENDS = re.compile(r"^mrl: |^\w+: .*; ending the workers|leaving")
"""Lines that give the reason of a run's end."""
NAMES = {
    "train": "trainer rank {}\\b",
    "engine": "engine {}\\b",
    "gcs": "Ray|GCS",
    "raylet": "Ray|raylet|node",
}
"""Pattern that such a line must contain, by kind of target; other kinds need none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one fault."""

    fault: str
    at: float
    """Seconds since the soak began."""
    step: int
    """Last finished step."""
    during: str
    """Phase of the driver; empty if the fault has none."""
    ended: bool
    """True if the fault ended the run's process."""
    code: int | None
    message: str
    """First line that reports it; empty without one."""
    said_after: float | None
    named: bool
    """True if it names the process or need not."""
    back_after: float | None
    """Seconds until a new step was done."""
    lost: int
    """Repeated steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Report of a soak."""

    outcomes: list[Outcome]
    slopes: list[Slope]
    facts: dict[str, Any]
    """Steps, seconds, lives."""
    faults: list[str]
    """Failed checks, as sentences."""

    @property
    def holds(self) -> bool:
        return not self.faults

    def write(self, out: Path) -> None:
        """Write report.json and report.md."""
        (out / "report.json").write_text(
            json.dumps(dataclasses.asdict(self) | {"holds": self.holds}, indent=1)
        )
        (out / "report.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        """Return the report as Markdown lines."""
        title = "passed" if self.holds else "FAILED"
        lines = [f"# Soak: {title}", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        lines += [f"- FAILED: {fault}" for fault in self.faults]
        lines += [
            "",
            "| at s | step | fault | run | said after s | back after s | steps again | message |",
            "|" + "---|" * 8,
        ]
        lines += map(_row, self.outcomes)
        lines += ["", "| figure | first | last | per 1,000 steps | per life | bound | |", "|" + "---|" * 7]
        return lines + [_slope_row(slope) for slope in self.slopes]


def made(
    out: Path, plan: Sequence[Fault], *, differences: Sequence[str], audit: str, extra: Mapping[str, Any]
) -> Report:
    """Build the report from events.jsonl and the samples of both runs; the run left alone is life 0.

    `audit`: findings, empty if it passes; `extra`: more facts."""
    events = rows(out / "events.jsonl")
    usage = [*rows(out / "reference-usage.jsonl"), *rows(out / "usage.jsonl")]
    results, growth = outcomes(events, plan), slopes(usage, BOUNDS)
    wrong = [*differences, *filter(None, [audit]), *_left(events), *_unexplained(events)]
    fired = {event["place"] for event in events if event["what"] == "fault"}
    wrong += [
        f"{fault} at step {fault.step} did not happen" for n, fault in enumerate(plan) if n not in fired
    ]
    wrong += [
        f"{outcome.fault} at {outcome.at:g} s was not named" for outcome in results if not outcome.named
    ]
    wrong += [f"{slope.name} grows" for slope in growth if not slope.flat]
    lives = max((event["life"] for event in events), default=0)
    facts = {"seconds": events[-1]["at"] if events else 0.0, "lives": lives, "faults": len(results), **extra}
    return Report(results, growth, facts, wrong)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def outcomes(events: Sequence[Mapping[str, Any]], plan: Sequence[Fault]) -> list[Outcome]:
    """Return the outcome of each fault that happened, in order of time."""
    places = [n for n, event in enumerate(events) if event["what"] == "fault"]
    return [_outcome(events, n, plan[events[n]["place"]]) for n in places]


def _outcome(events: Sequence[Mapping[str, Any]], place: int, fault: Fault) -> Outcome:
    event, after = events[place], events[place + 1 :]
    life = [row for row in after if row["life"] == event["life"]]
    until = next((n for n, row in enumerate(life) if row["what"] == "fault"), len(life))
    code = next((row["code"] for row in life[:until] if row["what"] == "exit"), None)
    ended = code is not None and code != 0
    says = [row for row in life[:until] if row["what"] == "says"]
    line = next((row for row in says if ENDS.search(row["text"]) or SAVE_FAILED in row["text"]), None)
    ends = [row["text"] for row in says if ENDS.search(row["text"])]
    highest = max((row["step"] for row in events[:place] if row["what"] == "step"), default=0)
    steps = [row for row in after if row["what"] == "step"]
    back = next((row["at"] for row in steps if row["step"] > highest), None)
    first = next((row["first"] for row in after if row["what"] == "start"), None)
    reached = next((row["step"] for row in life if row["what"] == "exit"), 0)
    return Outcome(
        fault=str(fault),
        at=event["at"],
        step=event["step"],
        during=event["during"],
        ended=ended,
        code=code,
        message=line["text"] if line else "",
        said_after=round(line["at"] - event["at"], 1) if line else None,
        named=not ended or _names(fault.target, ends),
        back_after=round(back - event["at"], 1) if back is not None else None,
        lost=reached - first + 1 if ended and first is not None else 0,
    )


def _names(target: str, lines: Sequence[str]) -> bool:
    kind, _, number = target.partition("-")
    return kind not in NAMES or any(re.search(NAMES[kind].format(number), line) for line in lines)


def _left(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about what lives left behind."""
    names = ("processes", "temporary", "shared")
    return [
        f"life {event['life']} left {name}: {event[name]}"
        for event in events
        if event["what"] == "left"
        for name in names
        if event[name]
    ]


def _unexplained(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about lives that failed without a fault."""
    hit = {event["life"] for event in events if event["what"] == "fault"}
    exits = [event for event in events if event["what"] == "exit" and event["code"] != 0]
    return [
        f"life {event['life']} ended with {event['code']} and had no fault"
        for event in exits
        if event["life"] not in hit
    ]


def _row(row: Outcome) -> str:
    run = f"ended, {row.code}" if row.ended else "went on"
    figures = ["" if value is None else f"{value:.1f}" for value in (row.said_after, row.back_after)]
    text = row.message.replace("|", "/")
    return (
        f"| {row.at:.0f} | {row.step} | {row.fault} | {run} | {' | '.join(figures)} | {row.lost} | {text} |"
    )


def _slope_row(slope: Slope) -> str:
    figures = (slope.first, slope.last, slope.within, slope.across, slope.bound)
    cells = ["" if value is None else f"{value:,.4g}" for value in figures]
    return f"| {slope.name} | {' | '.join(cells)} | {'flat' if slope.flat else 'GROWS'} |"
