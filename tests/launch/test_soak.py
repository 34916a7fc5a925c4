"""A run under faults ends as one that is left alone (benchmarks/soak): which faults come, what counts as growth, and three of them for real."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.soak import report
from benchmarks.soak.__main__ import main, nobody_else
from benchmarks.soak.clock import Clock
from benchmarks.soak.disturbed import Disturbed, Places
from benchmarks.soak.life import Life, SoakError
from benchmarks.soak.plan import CLOCK, DECK, DISK, Fault, draw
from benchmarks.soak.recipe import Recipe
from benchmarks.soak.slopes import WARM_STEPS, slope, slopes
from mrl.launch.commands import fault_injection
from mrl.observe.phases import PHASES

ROOT = Path(__file__).parents[2]


def default(seed: int) -> list[Fault]:
    """A plan of the default length."""
    return draw(seed, steps=5000, number=len(DECK), save_every=50)


def test_the_same_seed_draws_the_same_faults() -> None:
    assert default(3) == default(3) != default(4)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_every_kind_of_fault_and_every_phase_in_steps_that_have_it(seed: int) -> None:
    plan = default(seed)
    assert {f"{fault.target}:{fault.how}" for fault in plan} == set(DECK)
    assert {fault.phase for fault in plan if fault.of_process} == set(PHASES)
    assert all(1 < fault.step <= 5000 for fault in plan)
    assert all(fault.step % 50 == 0 for fault in plan if fault.phase == "save")


@pytest.mark.parametrize("first_step", [1, 51, 2001])
def test_fault_injection_understands_what_is_still_to_come(first_step: int) -> None:
    for fault in default(0):
        words = fault.words(first_step)
        assert bool(words) == (fault.target not in (DISK, CLOCK) and fault.step >= first_step)
        if words:
            known = fault_injection.InjectedFault.parse(words)
            assert (known.target, known.how, known.phase) == (fault.target, fault.how, fault.phase)


def test_a_phase_is_counted_from_the_first_step_of_a_start() -> None:
    assert Fault(70, "train-0", "kill", "update").words(51) == "update:train-0:20"
    assert Fault(150, "gcs", "pause", "save").words(51) == "save:gcs:100:pause@0"
    assert Fault(50, "gcs", "kill", "save").words(51) == ""


LIFE = 1000


def lives(per_step: float, per_life: float) -> list[list[tuple[float, float]]]:
    """Three lives with noise of 1 around 1,000; what they hold before WARM_STEPS is a tenth of that, and grows fast."""
    dice = random.Random(0)

    def value(number: int, age: int) -> float:
        level = 1000 + per_step * age if age >= WARM_STEPS else 100 + age / 10
        return level + per_life * number + dice.uniform(-1, 1)

    return [[(float(LIFE * n + age), value(n, age)) for age in range(1, LIFE, 5)] for n in range(3)]


@pytest.mark.parametrize(
    ("per_step", "per_life", "flat"), [(0, 0, True), (0.02, 0, False), (0, 20, False), (-0.02, -20, True)]
)
def test_growth_within_a_life_and_from_life_to_life_is_found(
    per_step: float, per_life: float, flat: bool
) -> None:
    found = slope("memory", lives(per_step, per_life), 10.0)
    assert found is not None and found.flat is flat
    assert found.within == pytest.approx(1000 * per_step, abs=3)
    assert found.across == pytest.approx(per_life, abs=2)


def test_what_a_life_gives_back_at_its_end_is_no_slope() -> None:
    points = [(1.0, 5.0), (60.0, 7.0), (99.0, 7.0), (100.0, 1.0)]
    rows = [{"life": 0, "step": step, "ray/files": value, "ray/bytes": 0.0} for step, value in points]
    found = {each.name: each for each in slopes(rows, {"ray/files": (1.0, 0.0), "ray": (9.0, 0.0)})}
    assert (found["ray/files"].first, found["ray/files"].last, found["ray/files"].bound) == (7.0, 7.0, 1.0)
    assert found["ray/bytes"].bound == 9.0


EVENTS: list[dict[str, Any]] = [
    {"at": 0, "life": 1, "what": "start", "first": 1},
    {"at": 9, "life": 1, "what": "step", "step": 7},
    {"at": 10, "life": 1, "what": "fault", "place": 0, "step": 7, "during": "update"},
    {"at": 12, "life": 1, "what": "says", "text": "mrl: WorkerLost: trainer rank 1 died in phase update"},
    {"at": 14, "life": 1, "what": "exit", "code": 1, "step": 7},
    {"at": 15, "life": 1, "what": "left", "seconds": 1, "processes": [], "temporary": [], "shared": []},
    {"at": 15, "life": 2, "what": "start", "first": 6},
    {"at": 20, "life": 2, "what": "step", "step": 7},
    {"at": 21, "life": 2, "what": "step", "step": 8},
    {"at": 22, "life": 2, "what": "exit", "code": 0, "step": 8},
    {"at": 23, "life": 2, "what": "left", "seconds": 1, "processes": [], "temporary": [], "shared": []},
]
KILLED = Fault(8, "train-1", "kill", "update")


def written(
    folder: Path, events: list[dict[str, Any]], plan: list[Fault], differences: list[str]
) -> report.Report:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return report.made(folder, plan, differences=differences, audit="", more={})


def test_a_report_tells_how_long_each_fault_took_and_what_it_cost(tmp_path: Path) -> None:
    found = written(tmp_path, EVENTS, [KILLED], [])
    (outcome,) = found.outcomes
    assert found.holds and outcome.ended and outcome.named
    assert (outcome.said_after, outcome.back_after, outcome.lost) == (2.0, 11.0, 2)


def changed(place: int, **values: Any) -> list[dict[str, Any]]:
    return [*EVENTS[:place], EVENTS[place] | values, *EVENTS[place + 1 :]]


@pytest.mark.parametrize(
    ("events", "plan", "differences", "fault"),
    [
        (changed(3, text="mrl: WorkerLost: something died"), [KILLED], [], "was not named"),
        (changed(5, shared=["segment"]), [KILLED], [], "life 1 left shared"),
        (changed(9, code=1), [KILLED], [], "life 2 ended with 1 and had no fault"),
        (EVENTS, [KILLED, dataclasses.replace(KILLED, step=9)], [], "did not happen"),
        (EVENTS, [KILLED], ["checkpoint file __0_0.distcp differs"], "differs"),
    ],
)
def test_a_report_says_what_is_not_as_it_has_to_be(
    events: list[dict[str, Any]], plan: list[Fault], differences: list[str], fault: str, tmp_path: Path
) -> None:
    found = written(tmp_path, events, plan, differences)
    assert len(found.faults) == 1 and fault in found.faults[0]


PRETENDED = """
import json, os, pathlib, sys, time
run, steps = pathlib.Path(sys.argv[1]) / "run", int(sys.argv[2])
saved = run / "checkpoints"
saved.mkdir(parents=True, exist_ok=True)
first = 1 + max((int(path.name[5:]) for path in saved.iterdir()), default=0)
faults = {int(words.split(":")[2]): words.split(":") for words in os.environ["MRL_FAULT"].split(",") if words}
for step in range(first, steps + 1):
    if fault := faults.get(step - first + 1):
        row = {"phase": fault[0], "target": fault[1], "count": int(fault[2]), "how": "kill", "after": None}
        with (run / "faults.jsonl").open("a") as file:
            file.write(json.dumps(row | {"during": fault[0]}) + "\\n")
        sys.exit("mrl: WorkerLost: trainer rank 1 died in phase update; the same command goes on")
    print(f"step {step}/{steps}", flush=True)
    if step % 4 == 0:
        (saved / f"step-{step:06d}").mkdir()
"""
"""A run without models: it prints steps, saves every fourth, and dies of what MRL_FAULT asks for."""


class Pretended(Recipe):
    def command(self, folder: Path, *more: str) -> list[str]:
        return [sys.executable, "-S", "-c", PRETENDED, str(folder), str(self.steps)]


def test_the_same_command_goes_on_after_each_death_and_no_fault_comes_twice(tmp_path: Path) -> None:
    plan = [KILLED, dataclasses.replace(KILLED, step=11), Fault(12, CLOCK, "3600")]
    for name in ("disk", "temporary"):
        (tmp_path / name).mkdir()
    places, clock = Places(tmp_path, tmp_path / "disk", tmp_path / "temporary"), Clock(tmp_path)
    disturbed = Disturbed(Pretended(tmp_path / "data", steps=20, save_every=4), plan, places, clock)
    disturbed.clean_seconds = 0.0  # other runs of the machine have segments in /dev/shm
    disturbed.run()
    events = report.rows(tmp_path / "events.jsonl")
    assert [event["first"] for event in events if event["what"] == "start"] == [1, 5, 9]
    assert [event["code"] for event in events if event["what"] == "exit"] == [1, 1, 0]
    found = report.outcomes(events, plan)
    assert [(each.ended, each.named, each.lost) for each in found] == [
        (True, True, 3),
        (True, True, 2),
        (False, True, 0),
    ]


def test_a_command_that_stands_still_is_ended_with_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Life(["sh", "-c", "echo step 3/9; sleep 600"], log=log, environment=dict(os.environ)) as life:
        with pytest.raises(SoakError, match="no step for 1 s after step 3"):
            life.follow(stalled_seconds=1.0)
        family = life.family()
    psutil.wait_procs(family, timeout=10)
    assert len(family) == 2 and not life.family()


def test_a_leg_that_another_command_makes_is_left_to_it(tmp_path: Path) -> None:
    """It is not done before its folder is written, long after its last step: what it has seen would be removed."""
    (tmp_path / "events.jsonl").write_text("seen\n")
    with nobody_else(tmp_path, "faults"), pytest.raises(SoakError, match="makes the leg faults of"):
        main(["--out", str(tmp_path), "--legs", "faults", "--faults", "1"])
    assert (tmp_path / "events.jsonl").read_text() == "seen\n"


def soak(out: Path, *words: str, seconds: float) -> dict[str, Any]:
    """The report of a soak that holds."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--out", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((out / "report.json").read_text())


@pytest.mark.integration
@pytest.mark.long
def test_a_kill_a_pause_and_a_full_disk_change_no_bit(tmp_path: Path) -> None:
    deck = ("train-1:kill", "engine-0:pause", "disk:full")
    words = ("--steps", "40", "--save-every", "4", "--disk-megabytes", "64", "--no-link", "--deck", *deck)
    told = soak(tmp_path, *words, seconds=500)
    outcomes = {each["fault"].split(" in ")[0]: each for each in told["outcomes"]}
    assert [outcomes[name]["ended"] for name in ("train-1 kill", "engine-0 pause", "disk full")] == [
        True,
        False,
        False,
    ]
    assert "trainer rank 1" in outcomes["train-1 kill"]["said"]
    assert "FAILED, training goes on" in outcomes["disk full"]["said"]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(5 * 3600)
def test_two_hours_under_every_fault_change_no_bit(tmp_path: Path) -> None:
    soak(tmp_path, "--steps", "5000", seconds=4.5 * 3600)
