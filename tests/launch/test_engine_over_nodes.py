"""Engines whose tp ranks span nodes, on real workers: log-probs, weight syncs, names of lost processes.

The nodes are pretended, the processes and their messages real; test_two_machines.py has a real link.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.actor_log import last_words
from mrl.launch.workers.colocated import Hybrid
from mrl.rollout.request import Sampling
from tests.engines import ENGINE_SHAPE
from tests.launch.hybrid_runs import (
    Future,
    agree,
    asked,
    come,
    long_requests,
    pairs_of_prompts,
    paused_after,
    requests_for,
    rollouts_of,
    running,
    sampled,
    tiny_config,
)
from tests.support.pretended_nodes import slots_on
from tests.support.runs import until
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

TP2 = ("training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2")
LAYOUTS = {
    "tp4-two-a-node": ([0, 0, 1, 1], ("training.layout={tp: 2, pp: 2, ep: 2, dp: 1}", "rollout.tp=4")),
    "dp2-tp2": ([0, 1, 2, 3],
        ("training.layout={tp: 2, pp: 1, ep: 2, dp: 2}", "rollout={dp: 2, tp: 2, expert_parallel: true}")),
    "one-of-two": ([0, 0, 0, 1], ("training.layout={tp: 1, pp: 2, ep: 2, dp: 2}", "rollout.tp=2")),
}  # fmt: skip
"""Name -> node of each slot, settings."""
REPLAY = "routing.replay=engine"
SECONDS = 20.0
"""Seconds within which a death is reported; the phases' deadline is 120 s."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=4):
        yield


@contextlib.contextmanager
def running_on(nodes: Sequence[int], config: Config, logs: Path) -> Iterator[Hybrid]:
    """Start a run whose slots pretend to be on these nodes."""

    with slots_on(nodes), running(config, logs) as hybrid:
        yield hybrid


def test_an_engine_over_two_nodes_agrees_and_a_lost_worker_of_its_second_is_named(
    task: Path, ray_cluster: None, tmp_path: Path
) -> None:
    config, logs = tiny_config(task / "model", task, REPLAY, *TP2), tmp_path / "logs"
    with running_on([0, 1], config, logs) as hybrid:
        further = hybrid.rollout.further
        assert [further.name(n) for n in further.numbers()] == ["engine 0, node 1"]
        agree(hybrid, config, tmp_path)
        (pid,) = further.on_all(lambda actor: os.getpid())
        lose(hybrid, workers(pid)[0].pid)
    assert "engine 0, node 1 lost its process VllmWorker-1" in last_words(logs)
    assert "engine 0 lost its process engine 0, node 1" in last_words(logs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_over_nodes_agree_in_other_layouts(layout, task, ray_cluster, tmp_path) -> None:
    nodes, words = LAYOUTS[layout]
    folder = write_model(
        tmp_path / "model",
        num_attention_heads=4,
        num_key_value_heads=4,
        **ENGINE_SHAPE | {"moe_intermediate_size": 128},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(task / "model" / name, folder / name)
    config = tiny_config(folder, task, REPLAY, *words)
    with running_on(nodes, config, tmp_path / "logs") as hybrid:
        agree(hybrid, config, tmp_path)


def test_paused_requests_continue_and_a_lost_process_of_a_further_node_is_named(
    task: Path, ray_cluster: None, tmp_path: Path
) -> None:
    """The lost process owns its node's workers, which end with it."""
    config, logs = tiny_config(task / "model", task, *TP2), tmp_path / "logs"
    with running_on([0, 1], config, logs) as hybrid:
        hybrid.sync(0)
        pause_and_continue(hybrid)
        (pid,) = hybrid.rollout.further.on_all(lambda actor: os.getpid())
        family = psutil.Process(pid).children(recursive=True)
        lose(hybrid, pid)
        _, alive = psutil.wait_procs(family, timeout=SECONDS)
        assert workers(pid) == [] and not [process for process in alive if "Worker" in process.name()]
    assert "engine 0 lost its process engine 0, node 1" in last_words(logs)


@pytest.mark.slow
def test_a_further_worker_that_stands_still_ends_the_wait_for_it(task, ray_cluster, tmp_path) -> None:
    """The wait ends after rollout.step_deadline_seconds, well before the phase's deadline."""
    config = tiny_config(task / "model", task, *TP2, "rollout.step_deadline_seconds=20")
    with running_on([0, 1], config, tmp_path / "logs") as hybrid:
        (pid,) = hybrid.rollout.further.on_all(lambda actor: os.getpid())
        (worker,) = workers(pid)
        future = generate(hybrid)
        worker.suspend()
        begun = time.monotonic()
        message = "engine 0 failed in phase .*engine 0 could not continue without the other ranks"
        with pytest.raises(WorkerLost, match=message):
            come(hybrid, future)
        worker.kill()
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_an_engine_over_nodes_is_replaced_on_all_of_them(task, ray_cluster, tmp_path) -> None:
    words = ("training.layout={tp: 1, pp: 1, ep: 1, dp: 1}", "rollout={tp: 2, max_replacements: 1}")
    words += ("launch.engine_slots=2", "loop.schedule=stream")
    config, prompts = tiny_config(task / "model", task, *words), pairs_of_prompts()
    with running_on([0, 1, 2], config, tmp_path / "logs") as hybrid:
        hybrid.sync(0)
        before = sampled(hybrid, prompts, greedy=True)
        (first,) = hybrid.rollout.further.on_all(lambda actor: os.getpid())
        os.kill(workers(first)[0].pid, signal.SIGKILL)
        until(lambda: hybrid.rollout.watch() or not hybrid.rollout.serving, seconds=SECONDS)
        hybrid.sync(1)
        (second,) = hybrid.rollout.further.on_all(lambda actor: os.getpid())
        assert hybrid.rollout.num_lost == 1 and second != first and workers(first) == []
        after = sampled(hybrid, prompts, greedy=True)
    assert [list(r.tokens) for r in after] == [list(r.tokens) for r in before]


def pause_and_continue(hybrid: Hybrid) -> None:
    """Check that interrupted greedy responses have the same tokens as uninterrupted ones."""
    sampling = Sampling(num_samples=1, temperature=1.0, max_tokens=24, seed=7, greedy=True)
    requests = requests_for(pairs_of_prompts(), sampling)
    at_once = come(hybrid, asked(hybrid, requests))
    future = asked(hybrid, requests)
    assert paused_after(hybrid, 8).num_requests
    in_parts = come(hybrid, future)
    assert max(len(item.segments) for item in in_parts) == 2
    assert [list(item.tokens) for item in in_parts] == [list(item.tokens) for item in at_once]


def workers(pid: int) -> list[psutil.Process]:
    """Return vLLM's workers of an engine's process."""
    family = psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []
    return [process for process in family if process.name().startswith("VLLM::Worker")]


def generate(hybrid: Hybrid) -> Future:
    """Submit requests and return while the engine generates them."""
    hybrid.sync(3)
    future = asked(hybrid, long_requests())
    rollouts_of(hybrid).resume()
    time.sleep(0.1)
    return future


def lose(hybrid: Hybrid, pid: int) -> None:
    """Kill this process while the engine generates, and check that the driver reports it."""
    future = generate(hybrid)
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match="engine 0 died in phase"):
        come(hybrid, future)
    assert time.monotonic() - begun < SECONDS
