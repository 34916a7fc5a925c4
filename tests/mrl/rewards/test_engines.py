"""Servers that a run starts for its judges: supervised, restarted, and never left behind."""

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.errors import ConfigError, WorkerLost
from mrl.processes.start import with_lifeline
from mrl.rewards.judges import supervisor as supervisor_module
from mrl.rewards.judges.supervisor import ServerJob, ServerSupervisor
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool import engines
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.reward_part import Served, ServerSection
from tests.support.judge_server import judge_server

SERVER = """
import http.server, socketserver, subprocess, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
subprocess.Popen(["sleep", "1000"])
socketserver.UnixStreamServer(sys.argv[1], Healthy).serve_forever()
"""
"""It has a child process, as vLLM's servers do."""


@contextlib.contextmanager
def supervised(folder: Path, program: str, **changes: Any) -> Iterator[ServerSupervisor]:
    at = Path(engines._socket_folder()) / "server"
    job = ServerJob(
        name="judge",
        command=with_lifeline([sys.executable, "-c", program, str(at)]),
        environment={},
        socket=str(at),
        log=folder / "engine.log",
        restarts=1,
        start_deadline_seconds=60.0,
    )
    supervisor = ServerSupervisor(dataclasses.replace(job, **changes))
    try:
        yield supervisor
    finally:
        supervisor.close()
        assert not at.parent.exists(), "what a killed server leaves there"


def server() -> psutil.Process:
    (process,) = (p for p in psutil.Process().children() if "socketserver" in " ".join(p.cmdline()))
    return process


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_a_server_is_started_again_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    with supervised(tmp_path, SERVER) as supervisor:
        supervisor.ready()
        first = server()
        children = first.children(recursive=True)
        assert children
        first.kill()
        until(lambda: supervisor.restarts)
        assert gone(children), "what the dead server had started"
        until(lambda: engines_answer(supervisor))
        second = server()
        everything = [second, *second.children(recursive=True)]
        assert len(everything) == 2
        supervisor.check()
    assert gone(everything)


def engines_answer(supervisor: ServerSupervisor) -> bool:
    return supervisor_module._answers(supervisor._job.socket)


def test_sockets_of_a_server_have_a_folder_whose_name_is_short(monkeypatch, tmp_path) -> None:
    """A socket's path has at most 107 bytes."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    for folder in (tempfile.gettempdir(), str(long)):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        sockets = Path(engines._socket_folder())
        try:
            assert not list(sockets.iterdir())
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(sockets / str(uuid.uuid4())))
        finally:
            shutil.rmtree(sockets)


def test_a_server_does_not_outlive_the_process_that_supervises_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.mrl.rewards.test_engines import SERVER, "
        "supervised\n"
        "with supervised(Path(sys.argv[1]), SERVER) as one: one.ready(); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as driver:
        assert driver.stdout is not None and driver.stdout.readline()
        first, *others = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert gone([first])
    for other in others:  # a server of ours ends these too: mrl/rollout/serve.py
        other.kill()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('no such model')", "before it served; 'ValueError: no such model'"),
        ("import time; time.sleep(1000)", "within start_deadline_seconds = 1"),
    ],
)
def test_a_server_that_does_not_come_up_is_given_up_with_its_own_words(tmp_path, program, words) -> None:
    deadline = 60.0 if "raise" in program else 1.0
    message = f"^judge: no answer.*{words}; its log is {tmp_path}"
    with (
        supervised(tmp_path, program, start_deadline_seconds=deadline) as supervisor,
        pytest.raises(ConfigError, match=message),
    ):
        supervisor.ready()


def test_a_server_that_ends_too_often_is_given_up(tmp_path: Path) -> None:
    with supervised(tmp_path, SERVER, restarts=0) as supervisor:
        supervisor.ready()
        server().kill()
        with pytest.raises(WorkerLost, match="judge is gone: it ended with status -9"):
            until(supervisor.check)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for a socket."""
    folder = engines._socket_folder()
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def addressed(socket: Path, folder: Path) -> RewardSection:
    """Return the section that the driver gives reward workers once the engine is up."""
    (folder / "tokenizer.json").write_text("{}")
    engines = {"judge": {"model": str(folder)}}
    server = ServerSection(tries=1)
    made = RewardSection(
        kind="llm", engine="judge", engines=engines, server=server, retries=0, deadline_seconds=60.0
    )
    changes = {"path": "http://engine/v1", "server": server.model_copy(update={"tokenizer": str(folder)})}
    return made.model_copy(update=changes).served_by(Served(str(socket), "judge"))


def test_samples_wait_for_a_server_of_the_run_that_is_away(make_pair: Any, tmp_path: Path) -> None:
    """Even with one try, a sample waits for refused connections until its deadline."""
    with short_folder() as folder, RewardPool(addressed(folder / "server", tmp_path)) as pool:
        pool.submit_all([make_pair(n, str(n), "12") for n in (11, 12)])
        assert not pool.collect(1.5), "nothing was scored while nobody answered"
        with judge_server(at=str(folder / "server")):
            verdicts, deadline = {}, time.monotonic() + 60.0
            while len(verdicts) < 2 and time.monotonic() < deadline:
                verdicts |= pool.collect(1.0)
    assert {name: verdict.value for name, verdict in verdicts.items()} == {"11.0": 0.0, "12.0": 1.0}


def test_a_run_ends_when_its_engine_is_gone_for_good(tmp_path: Path) -> None:
    def lost() -> None:
        raise WorkerLost("the engine reward.engines.judge is gone")

    section = addressed(tmp_path / "nobody", tmp_path)
    with RewardPool(section, check=lost) as pool, pytest.raises(WorkerLost, match="is gone"):
        pool.collect(0.0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kind": "llm", "engine": "a"}, "engine = 'a' is not in reward.engines"),
        ({"kind": "maths", "engines": {"a": {"model": "m"}}}, "engines.a is used by no verifier"),
        ({"kind": "maths", "engine": "a", "engines": {"a": {"model": "m"}}},
         "engine is not for kind = maths"),
        ({"kind": "llm"}, "needs either path or engine"),
        ({"kind": "llm", "engine": "a", "path": "http://a", "engines": {"a": {"model": "m"}}},
         "either path or engine"),
        ({"kind": "llm", "engine": "a", "server": {"tokenizer": "t"}, "engines": {"a": {"model": "m"}}},
         "leave it out"),
        ({"kind": "llm", "engine": "a", "engines": {"a": {"model": "m", "gpus": [0, 1]}}},
         "a rank is one GPU"),
        ({"kind": "llm", "engine": "a", "engines": {"a": {"model": "m", "gpus": [0], "shares_slots": True}}},
         "shares_slots needs gpus, and kv_cache_bytes"),
        (
            {
                "parts": [{"kind": "llm", "engine": "a"}, {"kind": "reward_model", "engine": "a"}],
                "engines": {"a": {"model": "m"}},
            },
            "is used as llm and reward_model",
        ),
    ],
)  # fmt: skip
def test_engines_that_cannot_be_meant_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RewardSection(**settings)
