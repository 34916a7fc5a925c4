"""A death is reported in one line: the killer, the memory of each worker, and which settings to lower."""

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.launch.commands.train import restart_hint
from mrl.launch.workers import deaths
from mrl.launch.workers.actor_log import last_words
from mrl.observe.phases import PhaseClock
from tests.support.runs import run_python

MONITOR = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 192.0.2.2, ID: c3fe99) was 22.85GB used / 23.54GB limit (0.970688)
OOM kill reason: Memory usage 24535000000B exceeded threshold of 24012256796B (95.0% of 25276059648B limit)
Object store memory usage: [- objects spillable: 0
- bytes evictable: 0

Eviction Stats:
(global lru) bytes evicted: 0]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(5d9f): job ID=01000000, task name=A.__init__, required resources={}, \
pid=19177, actual memory used=6.04GB)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
16006\t9.72\t/usr/bin/node /somewhere/index.js a b
19177\t6.04\tray::TrainActor.update
18181\t0.42\t.venv/bin/python -m pytest -q tests/launch/test_tune.py
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest
"""
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: A
\tpid: 19808
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: \
(1) the process was killed by the OOM killer"""
"""Messages of Ray 2.60."""
LOWER = (
    "lower rollout.kv_cache_bytes, training.microbatch_tokens or launch.object_store_bytes, "
    "or end other programs"
)


@pytest.fixture
def clock() -> PhaseClock:
    """Return the clock of a step with two calls of trainer ranks and one of engines."""
    clock, gib = PhaseClock(), float(2**30)
    clock.note({"mem/host_used/trainer/recompute": 2 * gib, "mem/host_used/trainer/update": 4.56 * gib})
    clock.note({"mem/host_used/engine/generate": 1.5 * gib})
    return clock


def test_rays_memory_monitor_is_named_with_who_held_how_much(clock: PhaseClock) -> None:
    assert deaths.death_cause(Exception(MONITOR), clock, here="192.0.2.2") == (
        "killed by Ray's memory monitor, because 22.85 of 23.54 GiB of node 192.0.2.2 were in use: "
        "6.04 by the killed process (pid 19177), 9.72 by node (pid 16006), 0.42 by python (pid 18181); "
        "earlier in this step, a trainer rank 4.6 GiB and an engine 1.5 GiB at most; " + LOWER
    )


def test_the_kernels_kills_are_counted(clock: PhaseClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "kernel_kills", lambda: deaths._KILLS_BEFORE + 2)
    cause = deaths.death_cause(Exception(KILLED), clock, here="192.0.2.2")
    assert cause.startswith("killed for lack of memory: the kernel killed 2 processes here since")
    assert "a trainer rank 4.6 GiB and an engine 1.5 GiB" in cause and cause.endswith(LOWER)
    assert deaths.death_cause(Exception(KILLED), PhaseClock(), here="192.0.2.3") == (
        "its process on 192.0.2.2 was killed or crashed"
    ), "what the kernel of another node did is not known"


def test_without_a_kill_of_the_kernels_memory_is_told_and_not_blamed(clock, monkeypatch) -> None:
    monkeypatch.setattr(deaths, "kernel_kills", lambda: deaths._KILLS_BEFORE)
    cause = deaths.death_cause(Exception(KILLED), clock, here="192.0.2.2")
    assert (
        cause.startswith("its process was killed or crashed; ")
        and "GiB of this machine are in use now" in cause
    )
    assert "lower" not in cause and "\n" not in cause


def test_what_ray_says_of_other_deaths_is_its_first_line() -> None:
    error = RuntimeError("The actor died because its node has died.\nNode Id: 5")
    cause = deaths.death_cause(error, PhaseClock(), here="192.0.2.2")
    assert cause == "RuntimeError: The actor died because its node has died."


def test_the_kernels_count_is_read(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 17\n")
    assert deaths.kernel_kills(tmp_path / "vmstat") == 17
    assert deaths.kernel_kills(tmp_path / "none") == 0 and deaths.kernel_kills() >= 0


def test_a_crash_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "train-0.log").write_text("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n")
    (tmp_path / "engine-0.log").write_text("last words: engine 0 lost its process x\n")
    assert last_words(tmp_path) == "engine 0 lost its process x; train-0.log: Segmentation fault"


def test_only_what_was_saved_is_gone_on_from(tmp_path: Path) -> None:
    assert (
        restart_hint(tmp_path / "checkpoints")
        == "there is no checkpoint yet; the same command starts from the beginning"
    )
    (tmp_path / "checkpoints/step-000001.partial").mkdir(parents=True)
    assert restart_hint(tmp_path / "checkpoints").startswith("there is no checkpoint yet")
    (tmp_path / "checkpoints/step-000001").mkdir()
    assert restart_hint(tmp_path / "checkpoints") == "the same command resumes from the last checkpoint"


PROGRAM = """
import os, signal, time
import ray
from ray._private import worker
from mrl.config.load import load_config
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.actor_group import ActorGroup
from mrl.observe.phases import PhaseClock

class Actor:
    def __init__(self, config, number, log_folder): pass
    def close(self): pass

def shut_down(shutdown=ray.shutdown):
    message = {"lines": ["Ray's message may come late"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    shutdown()

ray.shutdown = shut_down
config = load_config("configs/quickstart.yaml")
with cluster(config.launch, num_slots=1):
    group = ActorGroup(
        Actor, config, PhaseClock(),
        strategies=["DEFAULT"], slot_share=0.0, gpus=0.0, environment={}, log_folder=".",
    )
    seconds = 3 if WAY == "others" else 120
    call = group.start_on(
        0, lambda actor: os.kill(os.getpid(), signal.SIGKILL) if WAY == "kill" else time.sleep(seconds)
    )
    try:
        group.wait({"worker 0": call}, deadline_seconds=120)
        print("its work is done", flush=True)
    except WorkerLost as error:
        print(error, flush=True)
    print(group.death(0), flush=True)
"""


def run_program(way: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run PROGRAM with a worker that ends in this way; return the finished process."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return run_python("-c", f"WAY = {way!r}{PROGRAM}")


@pytest.mark.integration
def test_memory_that_others_use_ends_no_worker_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/conftest.py disables Ray's monitor, which here would always find too much memory in use."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    done = run_program("others", monkeypatch)
    assert done.stdout.splitlines()[:1] == ["its work is done"], done


@pytest.mark.integration
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        # another test may kill for lack of memory meanwhile
        ("kill", r"its process was killed or crashed; |killed for lack of memory: "),
        ("monitor", r"killed by Ray's memory monitor, because "),
    ],
)
def test_a_worker_that_is_really_killed(way: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting call and a health check both report the death, by SIGKILL or by Ray's monitor."""
    if way == "monitor":
        monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    done = run_program(way, monkeypatch)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and done.returncode == 0, done
    assert all(re.match(f"worker 0 died in phase start_up: ({cause})", line) for line in lines), lines
    assert "(raylet)" not in done.stderr and "Top 10" not in done.stderr
