"""Fork servers: what they fork is what a client was started as, and without them it starts by itself."""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.launch.workers import fork_client, fork_server
from mrl.launch.workers.fork_server import STANDING, ForkServers
from tests.launch.tiny_runs import ROOT
from tests.support.another_user import by_root, started_by_another_user, tried_by_another_user

SECONDS = 240
SCRIPT = """
import gc, json, os, random, sys
import numpy as np
print("to standard error", file=sys.stderr)
told = dict(
    pid=os.getpid(), parent=os.getppid(), words=sys.argv, environment=dict(os.environ), folder=os.getcwd(), first=sys.path[0],
    threads=len(os.listdir("/proc/self/task")), imported=list(sys.modules), main=sys.modules["__main__"].__file__,
    draws=[random.random(), float(np.random.random())], read=sys.stdin.read(), name=__name__, collects=gc.isenabled(),
    score=open("/proc/self/oom_score_adj").read(),
)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(str(ROOT / "configs/quickstart.yaml"))


@pytest.fixture(scope="module")
def servers(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """One kind that may be forked, one that has a thread."""
    kinds = {"plain": "tests.launch.preloads", "threaded": "tests.launch.preloads_with_a_thread"}
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("logs")
    servers = ForkServers(config, environment=environment, log_folder=folder, preloads=kinds)
    servers.wait(SECONDS)
    yield servers
    servers.close()


def told_by(python: str, folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """What a script says of its process that a shell starts as Ray's raylet does; it ends before the client's pipes do."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = ["bash", "-c", f'exec {python} "$@"', "bash", str(script), *words]
    raised = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, input="a line", capture_output=True, text=True, timeout=SECONDS, cwd=folder, env=raised
    )
    assert "to standard error" in done.stderr, done
    return json.loads(done.stdout)


def test_a_worker_is_forked_with_the_imports_made_as_what_its_client_was_started(
    servers: ForkServers, tmp_path: Path
) -> None:
    told = told_by(servers.python("plain"), tmp_path, "two words", "--x=1", OMP_NUM_THREADS="1", X="a b")
    assert "colorsys" in told["imported"] and "torch" in told["imported"]
    assert "ray" not in told["imported"], "Ray reads its worker's environment when it is imported"
    assert told["words"] == [str(tmp_path / "script.py"), "two words", "--x=1"]
    assert told["main"] == str(tmp_path / "script.py") and told["name"] == "__main__"
    environment = told["environment"]
    assert (environment["X"], "PYTHONPATH" in environment) == ("a b", False)
    assert (told["folder"], told["first"]) == (str(tmp_path), str(tmp_path))
    assert told["read"] == "a line" and told["threads"] == 1 and told["collects"]
    assert told["score"] == Path("/proc/self/oom_score_adj").read_text()
    server = psutil.Process(told["parent"])
    assert "mrl.launch.workers.fork_server" in server.cmdline()
    assert os.getpid() in {
        parent.pid for parent in server.parents()
    }  # so that all of a run is found below its driver


def test_workers_that_were_forked_from_one_process_draw_different_numbers(
    servers: ForkServers, tmp_path: Path
) -> None:
    first, second = (told_by(servers.python("plain"), tmp_path) for _ in range(2))
    assert first["parent"] == second["parent"] and first["pid"] != second["pid"]
    assert all(a != b for a, b in zip(first["draws"], second["draws"], strict=True))


def test_a_server_with_a_thread_forks_nothing(servers: ForkServers, tmp_path: Path) -> None:
    told = told_by(servers.python("threaded"), tmp_path, "word", X="1")
    assert "colorsys" not in told["imported"] and told["words"][1:] == ["word"]
    assert told["environment"]["X"] == "1"


def test_without_servers_a_worker_starts_by_itself(config: Config, tmp_path: Path) -> None:
    servers = ForkServers(
        config, environment={"PYTHONPATH": str(ROOT)}, log_folder=tmp_path, preloads={"k": "json"}
    )
    client = servers.python("k")
    servers.wait(SECONDS)  # `json` has nothing to preload with: the server has ended
    assert servers.python("k") == shlex.quote(sys.executable) != client
    assert told_by(client, tmp_path, "word")["words"][1:] == ["word"]
    servers.close()
    assert told_by(client, tmp_path, "word")["words"][1:] == ["word"]


LISTENS = """
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    for _ in range(2):
        with listener.accept()[0] as connection:
            print(connection.recv(1), flush=True)
"""
SENDS = """
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0" + sys.argv[1])
    try:
        socket.send_fds(client, [int(sys.argv[2]).to_bytes(8, "big")], [0, 1, 2])
        client.sendall(sys.argv[3].encode())
        print(client.recv(1))
    except OSError as error:
        print(type(error).__name__)
"""


@by_root
def test_nothing_is_told_to_another_user_who_took_the_name(config: Config, tmp_path: Path) -> None:
    servers = ForkServers(
        config, environment={"PYTHONPATH": str(ROOT)}, log_folder=tmp_path, preloads={"k": "json"}
    )
    client = servers.python("k")
    servers.wait(SECONDS)
    with started_by_another_user(LISTENS, servers._names["k"]) as stranger:
        assert stranger.stdout is not None
        try:
            assert stranger.stdout.readline() == "listens\n"
            assert servers.python("k") == shlex.quote(sys.executable)
            assert told_by(client, tmp_path, "word", KEY="secret")["environment"]["KEY"] == "secret"
            assert stranger.communicate(timeout=SECONDS)[0] == "b''\n" * 2
        finally:
            stranger.kill()
            servers.close()


@by_root
def test_nothing_is_forked_for_another_user(servers: ForkServers, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'made')!r}, 'w')")
    request = {"words": [str(script)], "environment": {}, "folder": "/", "oom_score": "0"}
    data = json.dumps(request)
    answer = tried_by_another_user(SENDS, servers._names["plain"], str(len(data)), data)
    assert answer in ("b''\n", "BrokenPipeError\n", "ConnectionResetError\n")
    told_by(servers.python("plain"), tmp_path)  # a later request has been answered
    assert not (tmp_path / "made").exists()


def test_a_server_that_does_not_answer_is_not_waited_for_and_forks_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "ANSWER_SECONDS", 0.2)
    name = f"mrl-silent-{os.getpid()}-{secrets.token_hex(8)}"
    with fork_server._listening(name) as listener:
        assert not fork_client.handed_over(name, ["script.py"])
        connection, _ = listener.accept()
        with connection:
            request = fork_server._received(connection)
            assert request is not None and request.words == ["script.py"]
            assert fork_server._has_left(connection)
    for stream in request.streams:
        os.close(stream)


def test_servers_that_are_kept_are_taken_by_runs_that_would_import_the_same(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(config: Config = config, **environment: str) -> ForkServers:
        told = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        return ForkServers(
            config, environment=told, log_folder=tmp_path, preloads={"plain": "tests.launch.preloads"}
        )

    kept = made()
    monkeypatch.setenv(STANDING, kept.standing())
    monkeypatch.setenv("MRL_SESSION", "of a run")
    same, more_threads = made(), made(OMP_NUM_THREADS="2")
    rollout = config.rollout.model_copy(update={"num_threads": 2})
    configured = made(config.model_copy(update={"rollout": rollout}))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    louder = made()
    own = [each.python("plain") for each in (kept, more_threads, configured, louder)]
    assert same.python("plain") == own[0] and len(set(own)) == 4
    same.close()
    assert told_by(own[0], tmp_path, "word")["words"][1:] == ["word"]
    assert "colorsys" in told_by(own[0], tmp_path)["imported"], "it serves on after a run of another"
    for each in (kept, more_threads, configured, louder):
        each.close()


def test_servers_end_with_their_driver(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from mrl.config.load import load_config\n"
        "from mrl.launch.workers.fork_server import STANDING, ForkServers\n"
        f"s = ForkServers(load_config({str(ROOT / 'configs/quickstart.yaml')!r}), environment={{}},"
        f" log_folder=Path({str(tmp_path)!r}), preloads={{'plain': 'tests.launch.preloads'}})\n"
        "print(s.python('plain'), flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    try:
        told_by(driver.stdout.readline().strip(), tmp_path)  # they serve
        deadline = time.monotonic() + SECONDS
        while len(below := psutil.Process(driver.pid).children(recursive=True)) > 2:
            assert time.monotonic() < deadline, f"more than a server and its parent: {below}"
            time.sleep(0.1)  # what the server forked has answered, and ends
        assert len(below) == 2
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert not psutil.wait_procs(below, timeout=SECONDS)[1]


@pytest.mark.integration
def test_the_imports_of_workers_start_no_thread_and_are_found_by_them(config: Config, tmp_path: Path) -> None:
    servers = ForkServers(config, environment={"PYTHONPATH": str(ROOT)}, log_folder=tmp_path)
    try:
        engine, trainer = (told_by(servers.python(kind), tmp_path) for kind in ("engine", "trainer"))
    finally:
        servers.close()
    assert {"vllm.v1.engine.llm_engine", "mrl.cpu.vllm_worker"} <= set(engine["imported"]), engine["parent"]
    assert {"megatron.core", "mrl.training.worker"} <= set(trainer["imported"])
    assert "megatron.core" not in engine["imported"] and "vllm" not in trainer["imported"]
    assert (engine["threads"], trainer["threads"]) == (1, 1)
    assert not {"ray", "ray._raylet"} & {*engine["imported"], *trainer["imported"]}
