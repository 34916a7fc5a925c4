"""Fork servers: a forked process equals its client, and all end with their owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forks.imports import quickstart
from tests.forks.servers import ROOT, ForkServers, digest, python, shared

SECONDS = 240
SCRIPT = """
import gc, json, os, random, sys
import numpy as np
print("to standard error", file=sys.stderr)
report = dict(
    pid=os.getpid(), parent=os.getppid(), words=sys.argv, environment=dict(os.environ), folder=os.getcwd(),
    first=sys.path[0], threads=len(os.listdir("/proc/self/task")), imported=list(sys.modules),
    main=sys.modules["__main__"].__file__, draws=[random.random(), float(np.random.random())],
    read=sys.stdin.read(), name=__name__, collects=gc.isenabled(),
    score=open("/proc/self/oom_score_adj").read(),
)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    servers = ForkServers(("plain",), module="tests.forks.small_imports")
    yield servers
    servers.close()


def command(servers: ForkServers, kind: str) -> str:
    program = python(servers.folder, kind)
    assert program is not None, (servers.folder / "log").read_text()
    return program


def reported(python: str, folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """Return the report of a script that a shell starts as Ray's raylet does; it ends before its pipes."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = ["bash", "-c", f'exec {python} "$@"', "bash", str(script), *words]
    done = subprocess.run(
        command,
        input="a line",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert "to standard error" in done.stderr, done
    return json.loads(done.stdout)


def test_a_worker_is_forked_with_the_imports_made_as_what_its_client_was_started(servers, tmp_path) -> None:
    report = reported(command(servers, "plain"), tmp_path, "two words", "--x=1", OMP_NUM_THREADS="1", X="a b")
    assert "colorsys" in report["imported"] and "torch" in report["imported"]
    assert "ray" not in report["imported"], "Ray reads its worker's environment when it is imported"
    assert report["words"] == [str(tmp_path / "script.py"), "two words", "--x=1"]
    assert report["main"] == str(tmp_path / "script.py") and report["name"] == "__main__"
    environment = report["environment"]
    assert (environment["X"], "PYTHONPATH" in environment) == ("a b", False)
    assert (report["folder"], report["first"]) == (str(tmp_path), str(tmp_path))
    assert report["read"] == "a line" and report["threads"] == 1 and report["collects"]
    assert report["score"] == Path("/proc/self/oom_score_adj").read_text()
    assert "tests.forks.server" in psutil.Process(report["parent"]).cmdline()


@pytest.mark.integration
def test_a_trainer_rank_on_cpu_loads_no_compiler(tmp_path: Path) -> None:
    imported = reported(command(shared(), "trainer"), tmp_path)["imported"]
    assert "mrl.training.worker" in imported and "torch._inductor.compile_fx" not in imported


def test_runs_that_would_import_something_else_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    config = quickstart()
    usual = digest(config, os.environ)
    monkeypatch.setenv("MRL_SESSION", "of a run")
    assert digest(config, os.environ) == usual
    rollout = config.rollout.model_copy(update={"num_threads": 2})
    assert digest(config.model_copy(update={"rollout": rollout}), os.environ) != usual
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert digest(config, os.environ) != usual


def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import time; from tests.forks.servers import ForkServers, python\n"
        "s = ForkServers(('plain',), module='tests.forks.small_imports')\n"
        "print(python(s.folder, 'plain'), flush=True); time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout is not None
    try:
        reported(owner.stdout.readline().strip(), tmp_path)  # they serve
        deadline = time.monotonic() + SECONDS
        while len(below := psutil.Process(owner.pid).children(recursive=True)) > 2:
            assert time.monotonic() < deadline, f"more than a server and its parent: {below}"
            time.sleep(0.1)  # what the server forked has answered, and ends
        assert len(below) == 2
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert not psutil.wait_procs(below, timeout=SECONDS)[1]
