"""`ray job submit` to a cluster that a user started: the run joins it and leaves it up."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.launch.cluster.ray_node import token_environment
from tests.launch.two_nodes import free_port_base, started, steps_done, write_run
from tests.support.runs import run_python, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RAY = ["-m", "ray.scripts.scripts"]
TOKEN = token_environment("0123456789abcdef" * 4)


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """Return the address of a one-node cluster with two slots, as `ray start --head` starts it."""
    base = free_port_base()
    folder = tempfile.mkdtemp(prefix="rj-")  # sockets in it: their paths are limited
    options = {
        "port": base,
        "dashboard-port": base + 2,
        "dashboard-agent-listen-port": base + 3,
        "dashboard-agent-grpc-port": base + 4,
        "metrics-export-port": base + 5,
        "ray-client-server-port": base + 6,
        "resources": json.dumps({"slot": 2}),
        "num-cpus": 2,
        "object-store-memory": 100 << 20,
        "temp-dir": folder,
    }
    words = [*RAY, "start", "--head", "--block", "--include-dashboard=true", "--disable-usage-stats"]
    words += [f"--{name}={value}" for name, value in options.items()]
    with started(words, log=tmp_path / "cluster.log", environment=TOKEN):
        yield f"http://127.0.0.1:{base + 2}"
    shutil.rmtree(folder, ignore_errors=True)


def job(dashboard: str, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = ["job", words[0], "--address", dashboard, *words[1:]]
    return run_python(*RAY, *arguments, environment=TOKEN, seconds=400)


def test_a_submitted_job_trains_and_leaves_the_cluster_up(dashboard: str, tmp_path: Path) -> None:
    until(lambda: not job(dashboard, "list").returncode, seconds=200, every=1.0)
    command = [sys.executable, "-m", "mrl.cli", "train", str(write_run(tmp_path)), "launch.slots_per_node=2"]
    done = job(dashboard, "submit", "--", *command)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout
    assert steps_done(tmp_path) == [1, 2]
    resolved = load([tmp_path / "runs/run/config.yaml"])
    assert (resolved.training.dtype, resolved.rollout.enforce_eager) == ("float32", True), (
        "its slots are no GPUs"
    )
    assert job(dashboard, "list").returncode == 0, "the run took the user's cluster down"
