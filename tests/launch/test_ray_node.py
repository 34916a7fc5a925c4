"""Two Ray nodes on one machine keep the launcher's order over three starts and leave nothing."""

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster.cluster import store_bytes
from mrl.launch.cluster.ray_node import (
    MOST_OPEN_FILES,
    Node,
    head_address,
    own_address,
    ray_node,
    token_of_environment,
)
from tests.launch.two_nodes import free_port_base, started, write_run
from tests.support.runs import run_python

TOKEN = "0123456789abcdef" * 4


FEW_FILES = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
runpy.run_module("mrl.launch.cluster.ray_node", run_name="__main__", alter_sys=True)
"""
PREFLIGHT = """
import sys
from dataclasses import replace
import ray
from mrl.launch.cluster.cluster import python_of_workers
from mrl.launch.preflight import NodeRequirements, check_nodes
from mrl.config.load import load
from mrl.errors import WorkerLost
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env=python_of_workers())
config = load([sys.argv[2]])
shared = NodeRequirements(  # this machine, with whom it may be
    memory_bytes=0, shared_memory_bytes=0, disk_bytes=0, disk_bytes_per_second=0, gloo_bytes_per_second=0
)
files, links = replace(shared, open_files=4097), replace(shared, gloo_bytes_per_second=1e15)
for num_nodes, floors, deadline in ((2, shared, 120), (2, files, 120), (2, links, 120), (3, shared, 1)):
    try:
        check_nodes(config, num_nodes=num_nodes, floors=floors, deadline_seconds=deadline)
        print("told: no fault")
    except WorkerLost as error:
        print("told:", *str(error).splitlines())
"""


def test_ports_are_fixed_and_offset_by_the_node() -> None:
    def ports(number: int) -> list[int]:
        node = Node(number=number, address="10.0.0.1", head="10.0.0.1:12000", slots=8, token=TOKEN)
        words = [word for word in node.command(Path("/tmp/x")) if "-port=" in word]
        return [int(word.rpartition("=")[2]) for word in words]

    assert ports(0)[0] == 12000
    assert all(12000 <= port < 12200 for port in ports(0))
    assert all(12200 <= port < 12400 for port in ports(1))
    assert len(set(ports(0))) == len(ports(0))
    assert ports(64) == ports(0)[1:]  # ranges repeat; the first is the head's own


def test_a_port_that_is_held_is_named_with_its_holder_before_ray_starts() -> None:
    node = Node(
        number=1, address="10.0.0.1", head="10.0.0.2:12000", slots=1, token=TOKEN, port_base=free_port_base()
    )
    held = list(node.fixed_ports())[2]
    with socket.create_server(("", held)), pytest.raises(WorkerLost) as caught, ray_node(node):
        raise AssertionError("Ray started on a port that is held")
    text = str(caught.value)
    assert (
        f"node 1 (10.0.0.1) cannot start Ray: port {held} (runtime-env-agent-port) "
        f"is used by process {os.getpid()} (" in text
    )
    assert "MRL_PORT_BASE" in text


def test_a_node_of_many_cores_starts_no_worker_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts a worker per CPU: 224 of them would need more ports than a node has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 224)
    node = Node(number=0, address="10.0.0.1", head="10.0.0.1:12000", slots=8, gpus=8, token=TOKEN)
    words = dict(word.split("=", 1) for word in node.command(Path("/tmp/x")) if "=" in word)
    ports = int(words["--max-worker-port"]) - int(words["--min-worker-port"])
    assert int(words["--num-cpus"]) + 4 * node.slots < ports / 2


def test_the_object_store_is_a_share_of_the_machine_that_shared_memory_can_hold(monkeypatch) -> None:
    def size(setting: int | None) -> str:
        node = Node(0, "10.0.0.1", "10.0.0.1:12000", 8, TOKEN, object_store_bytes=setting)
        (word,) = (word for word in node.command(Path("/tmp/x")) if word.startswith("--object-store-memory"))
        return word.partition("=")[2]

    assert size(1 << 30) == str(1 << 30)
    assert int(size(None)) <= psutil.virtual_memory().total // 10
    free = shutil.disk_usage("/dev/shm")._replace(free=400 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert size(None) == str(200 << 20)
    assert store_bytes(None) == 200 << 20


def test_the_secret_is_not_on_the_command_line() -> None:
    node = Node(number=1, address="10.0.0.1", head="10.0.0.2:12000", slots=1, token=TOKEN)
    assert not any(TOKEN in word for word in node.command(Path("/tmp/x")))


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "short")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN must contain"):
        token_of_environment()


@pytest.mark.integration
def test_preflight_names_the_bad_node_of_a_real_cluster(tmp_path: Path) -> None:
    """Preflight names node 1, which may open fewer files, slow links, and nodes that never joined."""
    base = str(free_port_base())
    head = head_address(own_address(), int(base))
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    words = ["--head", head, "--slots", "1", "--port-base", base, "--number"]
    with (
        started(
            ["-m", "mrl.launch.cluster.ray_node", *words, "0"],
            log=tmp_path / "0.log",
            environment=environment,
        ),
        started(["-c", FEW_FILES, *words, "1"], log=tmp_path / "1.log", environment=environment),
    ):
        program = ["-c", PREFLIGHT, head, str(write_run(tmp_path))]
        done = run_python(*program, environment=environment, seconds=300)
    logs = done.stderr[-3000:] + "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, logs
    messages = [line.removeprefix("told: ") for line in done.stdout.splitlines() if line.startswith("told: ")]
    well, files, links, missing = messages  # Ray prints to this stream too
    assert well == "no fault"
    assert files.startswith("preflight found 1 faults:   node 1 ("), files
    assert "limit of open files is 4.1e+03" in files
    assert "node 0" in links and "node 1" in links and "an all-reduce over gloo sends" in links, links
    assert missing.startswith("nodes [2] of 3 did not join within 1 s")


@pytest.fixture
def half_of_the_files() -> Iterator[int]:
    """Halve this process's limit of open files; yield the highest limit that it may set."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(limits[1], MOST_OPEN_FILES) if limits[1] != resource.RLIM_INFINITY else MOST_OPEN_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, limits[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.integration
def test_a_node_without_its_head_says_so_in_time_and_leaves_nothing(half_of_the_files: int) -> None:
    base = free_port_base()
    node = Node(
        number=1, address=own_address(), head=f"127.0.0.1:{base}", slots=1, token=TOKEN, port_base=base
    )
    start = time.monotonic()
    with (
        pytest.raises(WorkerLost, match=r"Ray on node 1 .* was not up in time"),
        ray_node(node, deadline_seconds=12),
    ):
        raise AssertionError("the node came up without a head")
    assert time.monotonic() - start < 120
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert allowed == half_of_the_files, "Ray's workers of a node open files and connections by the thousand"
    left = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if f"127.0.0.1:{base}" in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []
