"""vLLM's workers that are forked with their engine's imports are what workers that start anew are, and end when those would."""

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

THREADS = """
import threading
from tests.forks import vllm_workers
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    vllm_workers.stand_by()
except RuntimeError as error:
    print(error)
"""


def test_a_process_with_threads_has_no_server() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("2 threads run"), done


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
