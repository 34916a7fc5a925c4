"""A driver whose thread hangs exits with a message; Ray's calls to its own processes have no deadline."""

import subprocess
import textwrap

import psutil
import pytest

from tests.support.runs import run_python, until

HEAD = """
import os, signal, sys, threading, time
from mrl.launch.cluster import driver_watchdog
from mrl.observe.phases import PhaseClock

driver_watchdog.LEAST_SECONDS, driver_watchdog.CLOSING_SECONDS = {least}, {closing}
driver_watchdog.LOOK_SECONDS = 0.05
clock = PhaseClock()
"""
OF_RAY = """
import numpy as np
import psutil
import ray
from mrl.config.sections.launch import LaunchSection
from mrl.launch.cluster.cluster import cluster

launch = LaunchSection(object_store_bytes=80 << 20)
with driver_watchdog.DriverWatchdog(clock, 1.0) as watched, cluster(launch, num_slots=1):
    watched.begin()
    (raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
    print(raylet.pid, flush=True)
    os.kill(raylet.pid, signal.SIGSTOP)
"""


def run(program: str, *, least: float = 1.0, closing: float = 60.0) -> subprocess.CompletedProcess[str]:
    return run_python("-c", HEAD.format(least=least, closing=closing) + textwrap.dedent(program))


def test_a_thread_that_does_not_come_back_ends_the_process_by_name() -> None:
    done = run("""
        def standing_still():
            time.sleep(200)

        with driver_watchdog.DriverWatchdog(clock, 1.0) as watched:
            watched.begin()
            with clock.phase("update"):
                standing_still()
    """)
    assert done.returncode == 1
    assert "WorkerLost: the driver hung for 1 s in phase update in standing_still" in done.stderr
    assert "the same command resumes from the last checkpoint" in done.stderr and "Ray" not in done.stderr


def test_one_that_is_heard_or_outside_of_phases_or_closes_in_time_goes_on() -> None:
    """Between steps a caller may take any time; a phase whose error was caught is over too."""
    done = run("""
        with driver_watchdog.DriverWatchdog(clock, 1.0) as watched:
            watched.begin()
            with clock.phase("update"):
                for _ in range(3):
                    with clock.waiting():
                        time.sleep(0.5)
            time.sleep(1.3)
            try:
                with clock.phase("save"):
                    raise ValueError
            except ValueError:
                time.sleep(1.3)
            watched.closing()
            time.sleep(1.3)
        print("done", clock.listeners)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done []\n", "")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("with clock.phase('update'):\n        ray.put(np.zeros(1 << 20))",
         "1 s in phase update in put_object"),
        ("watched.closing()", "5 s while ending the workers in shutdown (ray/_private/worker.py:"),
    ],
)  # fmt: skip
def test_a_raylet_that_stands_still_is_not_waited_for(program: str, message: str) -> None:
    """Neither a large object nor the shutdown waits for it, and nothing of it is left."""
    done = run(OF_RAY + f"    {program}\n", closing=5.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr and "Ray's raylet or GCS on this node does not respond" in done.stderr
    raylet = int(done.stdout.split()[0])
    until(lambda: not psutil.pid_exists(raylet))  # what watches over the driver ends it


@pytest.mark.integration
def test_a_driver_that_ray_ends_for_a_dead_raylet_is_spoken_for() -> None:
    """Ray ends the process inside the call, without a message."""
    done = run(
        OF_RAY + "    threading.Timer(1.0, lambda: raylet.kill()).start()\n"
        "    ray.put(np.zeros(1 << 20))\n    print('went on')\n"
    )
    assert done.returncode == 1 and "went on" not in done.stdout
    assert (
        "ended without closing: it was killed, or Ray ended it because its raylet or GCS was gone"
        in done.stderr
    )
    assert "the same command resumes from the last checkpoint" in done.stderr
