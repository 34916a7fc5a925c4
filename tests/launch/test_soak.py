"""A run under faults ends like an undisturbed one (benchmarks/soak): plan, report, and three real faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import faults, report
from benchmarks.soak.plan import CLOCK, DECK, DISK, Fault, draw
from mrl.errors import ConfigError
from mrl.observe.phases import PHASES
from tests.support.runs import run_python


def default(seed: int) -> list[Fault]:
    return draw(seed, steps=5000, number=len(DECK), save_every=50)


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
            known = faults.InjectedFault.parse(words)
            assert (known.target, known.how, known.phase) == (fault.target, fault.how, fault.phase)


@pytest.mark.parametrize(
    "text",
    [
        "update",
        "lunch:driver:1",
        "update:train:1",
        "update:reward-1:1",
        "update:train-x",
        "save:driver:soon",
        "generate:guest-1",
        "generate:guest:1:drown@1",
        "generate:guest:1:kill",
        "generate:guest:1:kill@soon",
    ],
)
def test_what_cannot_is_said_before_workers_start(text: str) -> None:
    with pytest.raises(ConfigError, match="PHASE:TARGET:COUNT"):
        faults.InjectedFault.parse(text)


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
    return report.made(folder, plan, differences=differences, audit="", extra={})


def test_a_report_tells_how_long_each_fault_took_and_what_it_cost(tmp_path: Path) -> None:
    report = written(tmp_path, EVENTS, [KILLED], [])
    (outcome,) = report.outcomes
    assert report.holds and outcome.ended and outcome.named
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
def test_a_report_says_what_is_not_as_it_has_to_be(events, plan, differences, fault, tmp_path) -> None:
    report = written(tmp_path, events, plan, differences)
    assert len(report.faults) == 1 and fault in report.faults[0]


def soak(out: Path, *words: str, seconds: float) -> dict[str, Any]:
    done = run_python("-m", "benchmarks.soak", "--out", str(out), *words, seconds=seconds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((out / "report.json").read_text())


@pytest.mark.integration
@pytest.mark.long
def test_a_kill_a_pause_and_a_full_disk_change_no_bit(tmp_path: Path) -> None:
    deck = ("train-1:kill", "engine-0:pause", "disk:full")
    words = ("--steps", "40", "--save-every", "4", "--disk-megabytes", "64", "--no-link", "--deck", *deck)
    report = soak(tmp_path, *words, seconds=500)
    outcomes = {outcome["fault"].split(" in ")[0]: outcome for outcome in report["outcomes"]}
    assert [outcomes[name]["ended"] for name in ("train-1 kill", "engine-0 pause", "disk full")] == [
        True,
        False,
        False,
    ]
    assert "trainer rank 1" in outcomes["train-1 kill"]["message"]
    assert "FAILED, training goes on" in outcomes["disk full"]["message"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_deaths_of_rays_processes_pauses_and_a_clock_that_jumps_change_no_bit(tmp_path: Path) -> None:
    """Faults that no other test has. `python -m benchmarks.soak` runs all of them over 5,000 steps."""
    deck = [f"{target}:kill" for target in ("watcher", "raylet", "gcs", "agent")]
    deck += [f"{target}:pause" for target in ("driver", "reward", "raylet")]
    deck += ["driver:term", f"{CLOCK}:3600", f"{CLOCK}:-86400"]
    assert set(deck) <= set(DECK)
    soak(tmp_path, "--steps", "120", "--save-every", "6", "--no-link", "--deck", *deck, seconds=1700)
