"""A run under faults: restart the command after each death until its last step; log to events.jsonl."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import faults
from benchmarks.soak.clock import Clock
from benchmarks.soak.disk import fill, make_room
from benchmarks.soak.life import LOOK_SECONDS, Life, SoakError, command_of, step_of
from benchmarks.soak.plan import CLOCK, DISK, Fault
from benchmarks.soak.recipe import Recipe, environment, newest_checkpoint
from benchmarks.soak.usage import SHARED_MEMORY, Usage

FULL_SECONDS = 300.0
"""Longest time that a disk stays full."""
FRUITLESS = 4
"""Consecutive starts without a new step, after which the soak fails."""
CLEAN_SECONDS = 60.0
"""Longest time from the end of a command until nothing of it is left."""
SAVE_FAILED = "FAILED, training goes on"
CACHE = "torchinductor_"
"""Prefix of torch's cache, which belongs to the user, not to a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The folders of a run under faults."""

    out: Path
    """Logs, events and samples."""
    disk: Path
    """A file system of its own, with the run folder."""
    temporary: Path
    """TMPDIR of the command, which has Ray's session."""

    @property
    def run_folder(self) -> Path:
        return self.disk / "run"


class Disturbed:
    """A run under the faults of a plan."""

    def __init__(self, recipe: Recipe, plan: Sequence[Fault], places: Places, clock: Clock) -> None:
        self._recipe, self._plan, self._places, self._clock = recipe, plan, places, clock
        self._usage = Usage(places.out / "usage.jsonl", places.run_folder, places.temporary)
        self._begun = time.monotonic()
        self._number = self._highest = 0
        """Number of the life, from 1, and the highest step so far."""
        self._fired: set[int] = set()
        """Places in the plan."""
        self._recorded = 0
        """Lines read from faults.jsonl."""
        self._full_since: float | None = None
        self.clean_seconds = CLEAN_SECONDS

    def run(self) -> None:
        """Restart the command until its last step is done; raise SoakError if starts make no new step."""
        fruitless = 0
        while True:
            before = self._highest
            code = self._one_life()
            if code == 0 and self._highest >= self._recipe.steps:
                return
            fruitless = fruitless + 1 if self._highest == before else 0
            if fruitless == FRUITLESS:
                raise SoakError(f"{FRUITLESS} starts, up to life {self._number}, made no step after {before}")

    def _one_life(self) -> int:
        """Run the command once; return its exit code."""
        places, first = self._places, newest_checkpoint(self._places.run_folder) + 1
        self._number += 1
        self._coming = self._still_to_come(first)
        variables = {
            "TMPDIR": str(places.temporary),
            "MRL_FAULT": ",".join(self._coming),
            **self._clock.environment,
        }
        self._tell("start", first=first)
        command = self._recipe.command(places.disk, program=faults.__name__)
        log = places.out / f"logs/life-{self._number:03d}.log"
        with Life(command, log=log, environment=environment(**variables)) as life:
            code = life.follow(lambda: self._look(life), lambda line: self._hear(line, life))
            self._tell("exit", code=code, step=life.step)
            self._give_room(life)
            self._wait_until_clean(life)
            for line in life.new_lines():  # other processes report its end
                self._hear(line, life)
            return code

    def _still_to_come(self, first: int) -> dict[str, int]:
        """Return MRL_FAULT's words -> place in the plan, for faults possible from this first step."""
        words = {fault.words(first): n for n, fault in enumerate(self._plan) if n not in self._fired}
        return {text: place for text, place in words.items() if text}

    def _hear(self, line: str, life: Life) -> None:
        step = step_of(line)
        if step is not None:
            self._highest = max(self._highest, step)
            self._tell("step", step=step)
        elif line.strip():
            self._see_injected(life)  # a fault is recorded before the line that reports it
            self._tell("says", text=line)
        if SAVE_FAILED in line:
            self._give_room(life)

    def _look(self, life: Life) -> None:
        self._see_injected(life)
        for place, fault in enumerate(self._plan):
            if place not in self._fired and not fault.of_process and life.step >= fault.step:
                self._do(place, fault, life)
        if self._full_since is not None and time.monotonic() - self._full_since > FULL_SECONDS:
            self._give_room(life)
        self._usage.sample(life, self._number)

    def _see_injected(self, life: Life) -> None:
        """Read what fault injection wrote since the last call."""
        path = self._places.run_folder / "faults.jsonl"
        rows = path.read_text().splitlines() if path.is_file() else []
        for row in map(json.loads, rows[self._recorded :]):
            timing = "" if row["after"] is None else f":{row['how']}@{row['after']:g}"
            place = self._coming[f"{row['phase']}:{row['target']}:{row['count']}{timing}"]
            self._fire(place, life, during=row["during"])
        self._recorded = len(rows)

    def _do(self, place: int, fault: Fault, life: Life) -> None:
        """Cause a fault without a process: a full disk or a clock jump."""
        if fault.target == DISK and self._full_since is None:
            fill(self._places.disk)
            self._full_since = time.monotonic()
        elif fault.target == CLOCK and self._clock.can_jump:
            self._clock.jump(int(fault.how))
        else:
            return
        self._fire(place, life)

    def _give_room(self, life: Life) -> None:
        if self._full_since is not None:
            make_room(self._places.disk)
            self._full_since = None
            self._tell("room", step=life.step)

    def _fire(self, place: int, life: Life, during: str = "") -> None:
        self._fired.add(place)
        self._tell("fault", place=place, step=life.step, during=during)

    def _wait_until_clean(self, life: Life) -> None:
        """Wait until nothing is left, at most CLEAN_SECONDS; log what is."""
        begun, left = time.monotonic(), self._left(life)
        while any(left.values()) and time.monotonic() - begun < self.clean_seconds:
            time.sleep(LOOK_SECONDS)
            left = self._left(life)
        self._tell("left", seconds=round(time.monotonic() - begun, 2), **left)

    def _left(self, life: Life) -> dict[str, list[str]]:
        return {
            "processes": [command_of(process) for process in life.family()],
            "temporary": [name for name in os.listdir(self._places.temporary) if not name.startswith(CACHE)],
            "shared": os.listdir(SHARED_MEMORY),
        }

    def _tell(self, kind: str, **fields: Any) -> None:
        row = {"at": round(time.monotonic() - self._begun, 2), "life": self._number, "what": kind, **fields}
        with (self._places.out / "events.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
