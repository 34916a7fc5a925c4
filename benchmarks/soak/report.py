"""What a soak has shown, from its files alone: each fault and what became of it, what is left, what grows, whether the weights are the same."""

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
"""What is still called flat, per 1,000 steps and per life: the larger of a number and a part of the median. The run folder keeps rows, samples
and logs, which is what it is for."""
ENDS = re.compile(r"^mrl: |^\w+: .*; ending the workers|leaving")
"""A line that says why a run ends."""
NAMES = {
    "train": "trainer rank {}\\b",
    "engine": "engine {}\\b",
    "gcs": "Ray|GCS",
    "raylet": "Ray|raylet|node",
}
"""What has to be in it, by the target's kind; of other targets nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of one fault."""

    fault: str
    at: float
    """Seconds since the soak began."""
    step: int
    """The last that was done."""
    during: str
    """The phase that the driver was in; empty where the fault has none."""
    ended: bool
    """Whether the run's process ended by it."""
    code: int | None
    said: str
    """The first line that tells of it; empty where there was none."""
    said_after: float | None
    named: bool
    """Whether it names the process, where one has to be named."""
    back_after: float | None
    """Seconds until a step was done that had not been."""
    lost: int
    """Steps that were made again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    outcomes: list[Outcome]
    slopes: list[Slope]
    facts: dict[str, Any]
    """Steps, seconds, lives."""
    faults: list[str]
    """Sentences: what is not as it has to be."""

    @property
    def holds(self) -> bool:
        return not self.faults

    def write(self, out: Path) -> None:
        """report.json and report.md."""
        (out / "report.json").write_text(
            json.dumps(dataclasses.asdict(self) | {"holds": self.holds}, indent=1)
        )
        (out / "report.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        """Markdown."""
        title = "holds" if self.holds else "does NOT hold"
        lines = [f"# Soak: {title}", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        lines += [f"- NOT as it has to be: {each}" for each in self.faults]
        lines += [
            "",
            "| at s | step | fault | run | said after s | back after s | steps again | said |",
            "|" + "---|" * 8,
        ]
        lines += map(_row, self.outcomes)
        lines += ["", "| figure | first | last | per 1,000 steps | per life | bound | |", "|" + "---|" * 7]
        return lines + [_slope_row(each) for each in self.slopes]


def made(
    out: Path, plan: Sequence[Fault], *, differences: Sequence[str], audit: str, more: Mapping[str, Any]
) -> Report:
    """Of events.jsonl and the samples of both runs, where the one left alone is life 0. `audit`: empty where it holds. `more`: further facts."""
    events = rows(out / "events.jsonl")
    usage = [*rows(out / "reference-usage.jsonl"), *rows(out / "usage.jsonl")]
    found, growth = outcomes(events, plan), slopes(usage, BOUNDS)
    wrong = [*differences, *filter(None, [audit]), *_left(events), *_unexplained(events)]
    fired = {event["place"] for event in events if event["what"] == "fault"}
    wrong += [
        f"{fault} at step {fault.step} did not happen" for n, fault in enumerate(plan) if n not in fired
    ]
    wrong += [f"{each.fault} at {each.at:g} s was not named" for each in found if not each.named]
    wrong += [f"{each.name} grows" for each in growth if not each.flat]
    lives = max((event["life"] for event in events), default=0)
    facts = {"seconds": events[-1]["at"] if events else 0.0, "lives": lives, "faults": len(found), **more}
    return Report(found, growth, facts, wrong)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def outcomes(events: Sequence[Mapping[str, Any]], plan: Sequence[Fault]) -> list[Outcome]:
    """In order of time."""
    places = [n for n, event in enumerate(events) if event["what"] == "fault"]
    return [_outcome(events, n, plan[events[n]["place"]]) for n in places]


def _outcome(events: Sequence[Mapping[str, Any]], place: int, fault: Fault) -> Outcome:
    event, after = events[place], events[place + 1 :]
    own = [each for each in after if each["life"] == event["life"]]
    until = next((n for n, each in enumerate(own) if each["what"] == "fault"), len(own))
    code = next((each["code"] for each in own[:until] if each["what"] == "exit"), None)
    ended = code is not None and code != 0
    says = [each for each in own[:until] if each["what"] == "says"]
    said = next((each for each in says if ENDS.search(each["text"]) or SAVE_FAILED in each["text"]), None)
    ends = [each["text"] for each in says if ENDS.search(each["text"])]
    highest = max((each["step"] for each in events[:place] if each["what"] == "step"), default=0)
    steps = [each for each in after if each["what"] == "step"]
    back = next((each["at"] for each in steps if each["step"] > highest), None)
    first = next((each["first"] for each in after if each["what"] == "start"), None)
    reached = next((each["step"] for each in own if each["what"] == "exit"), 0)
    return Outcome(
        fault=str(fault),
        at=event["at"],
        step=event["step"],
        during=event["during"],
        ended=ended,
        code=code,
        said=said["text"] if said else "",
        said_after=round(said["at"] - event["at"], 1) if said else None,
        named=not ended or _names(fault.target, ends),
        back_after=round(back - event["at"], 1) if back is not None else None,
        lost=reached - first + 1 if ended and first is not None else 0,
    )


def _names(target: str, lines: Sequence[str]) -> bool:
    kind, _, number = target.partition("-")
    return kind not in NAMES or any(re.search(NAMES[kind].format(number), line) for line in lines)


def _left(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What commands left behind."""
    names = ("processes", "temporary", "shared")
    return [
        f"life {event['life']} left {name}: {event[name]}"
        for event in events
        if event["what"] == "left"
        for name in names
        if event[name]
    ]


def _unexplained(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lives that ended without a fault."""
    hit = {event["life"] for event in events if event["what"] == "fault"}
    exits = [event for event in events if event["what"] == "exit" and event["code"] != 0]
    return [
        f"life {each['life']} ended with {each['code']} and had no fault"
        for each in exits
        if each["life"] not in hit
    ]


def _row(each: Outcome) -> str:
    run = f"ended, {each.code}" if each.ended else "went on"
    figures = ["" if value is None else f"{value:.1f}" for value in (each.said_after, each.back_after)]
    said = each.said.replace("|", "/")
    return f"| {each.at:.0f} | {each.step} | {each.fault} | {run} | {' | '.join(figures)} | {each.lost} | {said} |"


def _slope_row(each: Slope) -> str:
    figures = (each.first, each.last, each.within, each.across, each.bound)
    told = ["" if value is None else f"{value:,.4g}" for value in figures]
    return f"| {each.name} | {' | '.join(told)} | {'flat' if each.flat else 'GROWS'} |"
