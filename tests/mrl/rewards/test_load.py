"""Verdicts do not depend on the machine's load: programs run alone and with busy processes on one core."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mrl.processes import own_time
from mrl.processes.own_time import OwnTimeClock, Starved
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.tasks import parse_task

RULES = CodeRules(seconds=0.8, cpu_seconds=0.6)
CALLS = parse_task(
    {"entry_point": "f", "cases": [{"args": [n], "expected": n + 1} for n in range(2)]}, place="x"
)
COMPUTE = "import time\ndef compute(seconds):\n    while time.process_time() < seconds: pass\n"
RIGHT = "def f(x): return x + 1\n"
PROGRAMS = {
    "right after half its time": (COMPUTE + "compute(0.25)\n" + RIGHT, CALLS, "accepted"),
    "never ends": (COMPUTE + "def f(x): compute(1e9)", CALLS, "time limit"),
    "sleeps": ("import time\ndef f(x): time.sleep(1e9)", CALLS, "time limit"),
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes on the core of this thread and its children."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    command = [
        sys.executable,
        "-S",
        "-c",
        "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: pass",
    ]
    # In sessions of their own: a kernel that groups processes by session would count them as one.
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(count)]
    try:
        for process in others:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield
    finally:
        for process in others:
            process.kill()
            process.communicate()
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_verdicts_beside_busy_processes(count: int) -> None:
    """With a quarter of a core, a correct program exceeds its limit by the clock."""
    with busy(count):
        for name, (program, task, outcome) in PROGRAMS.items():
            verdict = verify_program(program, task, RULES)
            assert verdict.reason.startswith(outcome), (name, verdict.reason)
            assert verdict.value == float(outcome == "accepted")


def test_a_program_that_gets_no_processor_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that needs half its time starves on a fifth of a core, and is not judged."""
    monkeypatch.setattr(own_time, "PATIENCE_SECONDS", 0.1)
    program, task, _ = PROGRAMS["right after half its time"]
    with busy(4), pytest.raises(Starved, match="starved"):
        verify_program(program, task, RULES, seconds=0.3)


def test_own_time_of_programs_that_compute_sleep_and_starve() -> None:
    """The measure is the program's own processor time, not the clock."""
    compute = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    with busy(3):
        assert 0.3 < own_seconds(compute) < 1.2
    assert own_seconds("import time\ntime.sleep(0.5)\nprint(flush=True)\ninput()") > 0.4


def test_threads_that_come_and_go_take_no_time_away() -> None:
    threads = (
        "import threading\nwhile True:\n"
        "    t = threading.Thread(target=sum, args=(range(3000),)); t.start(); t.join()"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", threads])
    try:
        measured = OwnTimeClock(process.pid)
        seen = []
        for _ in range(200):
            measured.look()
            seen.append(measured.cpu)
        assert seen == sorted(seen)
    finally:
        process.kill()
        process.wait()


def own_seconds(program: str) -> float:
    """Return the own time until a program's first line."""
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    measured, deadline = OwnTimeClock(process.pid), time.monotonic() + 60.0
    try:
        with measured:
            assert process.stdout.readline() == b"\n"
        measured.look()
        assert time.monotonic() < deadline
        return measured.seconds
    finally:
        process.kill()
        process.communicate()
