"""Environments on nodes, behind the pool of one: an episode stays where it was opened, and what a lost node had is answered as lost."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.pool import EnvironmentPool
from mrl.agents.tool_calls import ToolCall
from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.environment_nodes import EnvironmentNodes
from mrl.launch.workers.placement import node_strategies
from mrl.observe.phases import PhaseClock
from tests.launch.two_nodes import ROOT, write_run
from tests.support.environments import FILE
from tests.support.processes import children
from tests.support.runs import until

pytestmark = pytest.mark.integration

ONE_OF_ITS_NODE = """
import os
class Other:
    tools = [{"type": "function", "function": {"name": f"of process {os.getppid()}"}}]
    def reset(self, task, seed): return ""
    def step(self, text, calls): raise NotImplementedError
    def close(self): pass
"""
Both = tuple[EnvironmentNodes, EnvironmentPool]


@pytest.fixture(scope="module", autouse=True)
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    launch = load([str(write_run(tmp_path_factory.mktemp("ray")))]).launch
    with cluster(launch, num_slots=1):
        yield


@contextlib.contextmanager
def both(folder: Path, environment: str) -> Iterator[Both]:
    """Two nodes, each of which is this machine, and the pool over them."""
    words = [
        f"agent={{environment: '{environment}', nodes: all, step_seconds: 60}}",
        "reward={kind: environment}",
    ]
    config = load([str(write_run(folder))], words)
    variables = {"PYTHONPATH": str(ROOT), "MRL_SESSION": os.environ["MRL_SESSION"]}
    nodes = EnvironmentNodes(
        config,
        PhaseClock(),
        strategies=2 * node_strategies(),
        environment=variables,
        log_folder=str(folder / "logs"),
    )
    try:
        with nodes.pool() as pool:
            yield nodes, pool
    finally:
        until(lambda: not children("mrl.agents.host", recursive=True))


def answers(pool: EnvironmentPool, count: int) -> dict[str, EnvironmentAnswer]:
    found: list[EnvironmentAnswer] = []
    until(lambda: found.extend(pool.poll(1.0)) or len(found) >= count)
    assert len(found) == count == len({answer.key for answer in found})
    return {answer.key: answer for answer in found}


def opened(pool: EnvironmentPool, environment: str, *keys: str, **task: Any) -> dict[str, EnvironmentAnswer]:
    for key in keys:
        pool.open(key, environment, task, 7)
    return answers(pool, len(keys))


def actor(nodes: EnvironmentNodes, number: int) -> psutil.Process:
    return psutil.Process(ray.get(nodes.start_on(number, lambda _: os.getpid()), timeout=60))


def host(nodes: EnvironmentNodes, number: int) -> psutil.Process:
    """The one that a node has; the processes of its episodes are its children."""
    (found,) = children("mrl.agents.host", actor(nodes, number))
    return found


def shares(nodes: EnvironmentNodes) -> list[int]:
    return [len(host(nodes, number).children()) for number in range(2)]


def test_two_nodes_answer_as_one_pool(tmp_path: Path) -> None:
    environment, keys = FILE + "Counting", [f"e{number}" for number in range(8)]
    with both(tmp_path, environment) as (nodes, pool):
        said = {
            answer.messages[0]["content"] for answer in opened(pool, environment, *keys, turns=2).values()
        }
        assert len(said) == 1, "the same seed"
        assert shares(nodes) == [4, 4]
        for key in keys:
            pool.step(key, f"to {key}", [ToolCall("add", {"n": 3})] if key == "e5" else [])
        for key, answer in answers(pool, len(keys)).items():
            heard = "add: 3" if key == "e5" else f"heard to {key}"
            assert (answer.messages[0]["content"], answer.turn, answer.reward) == (heard, 1, 0.5)
        for key in keys:
            pool.step(key, "")
        assert all(answer.done and answer.reward == 1.0 for answer in answers(pool, len(keys)).values())
        for key in keys[::2]:  # all of one node, which has the fewest then
            pool.close(key)
        opened(pool, environment, "f0", "f1", "f2", "f3", turns=1)
        assert shares(nodes) == [4, 4]


def test_who_does_not_know_the_secret_is_not_heard(tmp_path: Path) -> None:
    """One connects just before a host is started."""
    environment = FILE + "Counting"
    with both(tmp_path, environment) as (nodes, pool):
        address, port, _ = nodes.addresses[0]
        with socket.create_connection((address, port), timeout=60) as stranger:
            stranger.sendall(bytes(40))
            (first := host(nodes, 0)).kill()
            until(lambda: first.status() == psutil.STATUS_ZOMBIE)
            assert pool.poll(1.0) == [], "it ended while nobody waited for it"
            opened(pool, environment, "a", "b", turns=1)
            assert shares(nodes) == [1, 1] and host(nodes, 0) != first
            assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Other", "says other things of itself on environments of node 1 than on environments of node 0"),
        ("Nobody", r"no class 'Nobody'.*\(on environments of node \d\)"),
    ],
)
def test_an_environment_that_is_not_there_or_another_one_ends_the_start(name, said, tmp_path) -> None:
    (tmp_path / "other.py").write_text(ONE_OF_ITS_NODE)
    with pytest.raises(ConfigError, match=said), both(tmp_path, f"{tmp_path}/other.py:{name}"):
        pass
