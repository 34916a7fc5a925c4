"""Workers that are forked with their engine's imports are what workers that start anew are, and end when those would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.rollout.engine import RolloutEngine
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.support.another_user import by_root, tried_by_another_user

THREADS = """
import threading
from mrl.rollout import worker_forks
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    worker_forks.stand_by()
except RuntimeError as error:
    print(error)
"""


def test_a_process_with_threads_has_no_server() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("2 threads run"), done


SERVED = """
import multiprocessing
from multiprocessing import forkserver
from mrl.rollout import worker_forks
worker_forks.fork_server()
print(forkserver._forkserver._forkserver_address[1:], flush=True)
input()
process = multiprocessing.get_context("forkserver").Process(target=print, args=("forked for its own user",))
process.start()
process.join(60)
"""
SENT_BY_ANOTHER = """
class Code:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0" + sys.argv[1])
    read, write = os.pipe()
    os.write(write, pickle.dumps(Code()))
    os.close(write)
    try:
        reduction.sendfds(client, [read, os.pipe()[1], os.pipe()[1], os.pipe()[1]])
        print(client.recv(1))
    except OSError as error:
        print(type(error).__name__)
"""


@by_root
def test_what_another_user_sends_is_not_unpickled(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert tried_by_another_user(SENT_BY_ANOTHER, address, str(tmp_path / "made")) in (
            "b''\n",
            "BrokenPipeError\n",
            "ConnectionResetError\n",
        )
        printed, _ = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    assert printed == "forked for its own user\n", "it serves on"
    assert not (tmp_path / "made").exists()


@pytest.fixture
def host(tiny_model: Path) -> Iterator[EngineHost]:
    settings = {name: value for name, value in driving.SEVERAL.items() if name != "expert_parallel"}
    host = EngineHost(
        rollout=RolloutSection(tp=2, **settings), model_path=str(tiny_model), max_length=64, seed=1
    )
    yield host
    host.close()


def environments(engine: RolloutEngine) -> list[dict[str, str]]:
    """Of the engine's process, and of each worker."""
    return [dict(os.environ), *engine._engine.collective_rpc(_environment)]  # type: ignore[attr-defined]


def _environment(worker: Any) -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.integration
def test_workers_are_forked_and_end_with_their_engine(host: EngineHost) -> None:
    below = psutil.Process(host.process.pid).children(recursive=True)
    workers = [process for process in below if process.name().startswith("VLLM::Worker")]
    (server,) = {worker.parent() for worker in workers}
    assert len(workers) == 2 and {server, *workers} == set(below)
    assert server.ppid() == host.process.pid, "the server is a fork of the engine's process"
    engine, *others = host.call(environments)
    own = {"OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE"}
    assert own <= engine.keys()
    engine.pop("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")  # which vLLM names anew in each process
    different = [{n: (v, other.get(n)) for n, v in engine.items() if other.get(n) != v} for other in others]
    assert different == [{}, {}]
    left = host.kill()
    assert {process.pid for process in left} == {process.pid for process in below}
    assert not psutil.wait_procs(below, timeout=60)[1]
