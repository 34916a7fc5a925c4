"""A run's own Ray starts only what the run uses; a failed start is one of our errors and leaves nothing."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.sections.launch import LaunchSection
from mrl.errors import ConfigError, WorkerLost
from mrl.files import LONGEST_TEMPORARY
from mrl.launch.cluster.cluster import cluster, session_folder, token_environment, with_retries
from tests.support.listeners import is_private, listeners
from tests.support.processes import children
from tests.support.runs import run_python, until


def test_a_ray_that_does_not_start_says_what_can_be_done(tmp_path, monkeypatch) -> None:
    """Request an object store below Ray's minimum, past the section's own bound."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("mrl.files.LONGEST_TEMPORARY", 4096)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launch = LaunchSection.model_construct(object_store_bytes=1000)
    with (
        pytest.raises(WorkerLost, match=r"Ray did not start on this machine: .*wait for them"),
        cluster(launch, num_slots=1),
    ):
        pass
    assert not os.listdir(tmp_path)


def test_a_node_that_is_not_there_yet_is_asked_for_again() -> None:
    """Retry until the deadline or a final refusal; that message is the error."""
    answers = iter([False, False, True])

    def ask(*, number: int) -> int:
        if next(answers, False):
            return number
        raise RuntimeError("not there")

    assert with_retries(ask, 60.0, lambda: True)(number=7) == 7
    for seconds, lives in ((0.0, True), (3600.0, False)):
        with pytest.raises(RuntimeError, match="not there"):
            with_retries(ask, seconds, lambda lives=lives: lives)(number=7)


STRANGER = """
import json, os, socket, sys
from ray._raylet import GcsClient
head, folder, sockets = sys.argv[1:]
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

def refusal(attempt):
    try:
        return repr(attempt())
    except Exception as error:
        return type(error).__name__

def connect(path):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)

found = {path: refusal(lambda: connect(path)) for path in sockets.split(os.pathsep)}
found["folder"] = refusal(lambda: os.listdir(folder))
found["head"] = refusal(lambda: GcsClient(head).internal_kv_keys(b""))
print(json.dumps(found | {"uid": os.getuid()}))
"""
"""Attempts of another user, or of the same user's program without the secret if not root."""


@pytest.mark.integration
def test_a_run_s_ray_has_what_it_uses_and_nobody_else_gets_there(tmp_path, monkeypatch) -> None:
    """Ray has no dashboard, log reader or autoscaler, listens on loopback, stores its secret nowhere.

    HOME cannot be written here, and TMPDIR is the longest below which Ray's sockets fit."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", "/proc/self")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's own, for another cluster")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as short:
        longest = Path(f"{short}/{'x' * (LONGEST_TEMPORARY - len(short) - 1)}")
        longest.mkdir()
        Path(short).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", str(longest))
        before = {*psutil.Process().children()}  # of the tests that this process had; they may fork meanwhile
        with cluster(LaunchSection(), num_slots=1):
            from ray._private.worker import _global_node

            assert _global_node is not None
            secret, head = os.environ["RAY_AUTH_TOKEN"], _global_node.gcs_address
            (folder,) = longest.iterdir()
            tops = {*psutil.Process().children()} - before
            started = [member for top in tops for member in (top, *top.children(recursive=True))]
            commands = [" ".join(process.cmdline()) for process in started]
            log = Path(_global_node.get_logs_dir_path()) / "dashboard_agent.log"
            until(lambda: "Loaded " in log.read_text())
            agent_log = log.read_text()
            heard = listeners([psutil.Process(), *started])
            reached = [where for where in heard if not is_private(where)]
            sessions = {os.getsid(member.pid) for member in started}
            kept = [
                path
                for path in folder.rglob("*")
                if path.is_file() and secret in path.read_text(errors="replace")
            ]
            sockets = [where.removeprefix("unix ") for where in heard if where.startswith("unix ")]
            words = [head, str(folder), os.pathsep.join(sockets)]
            environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
            stranger = subprocess.run(
                [sys.executable, "-c", STRANGER, *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=240,
            )
    assert (
        os.environ["RAY_AUTH_TOKEN"] == "the user's own, for another cluster" != secret and len(secret) == 64
    )
    names = ("session_watcher", "gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent")
    unexpected = [command for command in commands if not any(name in command for name in names)]
    assert not unexpected and len(commands) == len(names), commands
    assert "Loaded 0 modules" in agent_log, agent_log
    assert len(sockets) == 2 and len(heard) > 5 and not reached, heard
    assert os.getsid(0) not in sessions and not kept
    answers = json.loads(stranger.stdout.splitlines()[-1])
    assert (uid := answers.pop("uid")) == (65534 if os.getuid() == 0 else os.getuid()) and len(answers) == 4
    assert answers.pop("head") == "AuthenticationError", answers
    assert uid == os.getuid() or set(answers.values()) == {"PermissionError"}, answers


def test_a_long_folder_of_temporary_files_is_not_taken_for_sockets(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    with session_folder() as folder:
        assert folder.parent == Path("/tmp") and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "access", lambda *_: False)
    with (
        pytest.raises(ConfigError, match=r"TMPDIR = /.*xxx is too long .* set TMPDIR to a folder of at most"),
        session_folder(),
    ):
        pass


@pytest.mark.parametrize("there", ["nobody", "another server", "one that says nothing", "no port"])
def test_a_ray_that_does_not_answer_is_said_in_one_line_in_seconds(there, monkeypatch, capfd) -> None:
    monkeypatch.setattr(
        "mrl.launch.cluster.cluster.HEAD_SECONDS", 1.0 if there == "one that says nothing" else 60.0
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        if there == "nobody":
            server.close()
        if there == "another server":
            threading.Thread(
                target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 no\r\n\r\n"), daemon=True
            ).start()
        address = f"{host}:{port}" if there != "no port" else f"{host}:head"
        reason = {
            "nobody": "Connection refused",
            "another server": "the server at this address is not Ray's head",
            "one that says nothing": "timed out",
            "no port": "invalid literal",
        }[there]
        with (
            pytest.raises(
                ConfigError,
                match=rf"cannot join Ray at {address} \(launch.ray_address or RAY_ADDRESS\): .*{reason}",
            ) as error,
            cluster(LaunchSection(ray_address=address), num_slots=1),
        ):
            pass
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look(name, monkeypatch) -> None:
    """Runs in another process, which Ray ends a minute later."""
    program = f"""
import psutil, time
from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
with cluster(LaunchSection(), num_slots=1) as ray:
    ray.require("update")
    next(each for each in psutil.Process().children() if each.name() == {name!r}).kill()
    time.sleep(1.5)
    try:
        ray.require("update")
    except WorkerLost as error:
        print(error, flush=True)
"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = run_python("-c", program)
    assert f"Ray's {name} of this node died in phase update" in done.stdout, done.stderr


def watchers(folder: Path) -> list[psutil.Process]:
    return children(str(folder))


def test_a_watcher_that_dies_has_a_successor(capfd, monkeypatch) -> None:
    """The successor also comes if the machine at first has no process left for it."""
    with session_folder() as folder:
        (first,) = watchers(folder)
        refused = [BlockingIOError("no process left")]
        started = subprocess.Popen

        def popen(*words: Any, **options: Any) -> Any:
            if refused:
                raise refused.pop()
            return started(*words, **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        first.kill()
        # One look at a time: of two, the first could see the watcher that ended and the second nobody.
        until(lambda: watchers(folder) not in ([], [first]), seconds=300)
        assert not refused
    assert not folder.exists() and not watchers(folder)
    assert not capfd.readouterr().err, "whoever closes is not spoken for"


ON_ONE_MACHINE = """
from mrl.config.sections.launch import LaunchSection
from mrl.launch.cluster.cluster import cluster
own = cluster(LaunchSection(), num_slots=1)
"""
ON_NODES = """
import contextlib
from mrl.launch.cluster.cluster import join
from mrl.launch.cluster.ray_node import Node, head_address, own_address, ray_node
from tests.launch.two_nodes import free_port_base

@contextlib.contextmanager
def joined():
    base = free_port_base()
    head = head_address(own_address(), base)
    token = os.environ["RAY_AUTH_TOKEN"]
    node = Node(number=0, address=own_address(), head=head, slots=1, token=token, port_base=base)
    with ray_node(node) as process:
        join(head, head_seconds=60.0)
        yield
        ray.shutdown()
        assert process.poll() is None, "one of Ray's own processes ended"

own = joined()
"""
ASK = """
import os
import ray
%s
with own:
    started = ray.remote(num_cpus=0, runtime_env={"env_vars": {"GIVEN": "started"}})
    print(ray.get(started(lambda: os.environ["GIVEN"]).remote(), timeout=60))
"""


@pytest.mark.integration
@pytest.mark.parametrize("start", [ON_ONE_MACHINE, ON_NODES], ids=["one machine", "nodes"])
def test_workers_start_from_an_environment_under_a_path_with_a_space(start: str, tmp_path: Path) -> None:
    """Ray writes the path unquoted into shell lines, for workers with variables and for its client."""
    ours = tmp_path / "my own"
    (ours / "bin").mkdir(parents=True)
    (ours / "bin/python").symlink_to(Path(sys.executable).resolve())
    (ours / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", ours)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= token_environment("0123456789abcdef" * 4)
    words = [str(ours / "bin/python"), "-c", ASK % start]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["started"], done.stderr[-2000:]
