"""Reward processes behind actors: the interface of one pool, each node's own, and a lost node is named."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mrl.config.load import load
from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.reward_group import RewardGroup
from mrl.observe.phases import PhaseClock
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Sample, Verdict
from tests.launch.two_nodes import ROOT, write_run
from tests.support.runs import until

pytestmark = pytest.mark.integration

PLUGIN = '''
import os

def rank(requests):
    """The longest response of its group gets 1."""
    longest = max(len(r.response) for r in requests)
    return [float(len(r.response) == longest) for r in requests]
'''


@pytest.fixture(scope="module", autouse=True)
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    launch = load([str(write_run(tmp_path_factory.mktemp("ray")))]).launch
    with cluster(launch, num_slots=1):
        yield


@contextlib.contextmanager
def group(folder: Path, *words: str) -> Iterator[RewardGroup]:
    """Of a one-node Ray, with samples scored by whole groups of 4."""
    (folder / "plugin.py").write_text(PLUGIN)
    reward = [
        "reward.kind=plugin", f"reward.path={folder}/plugin.py:rank", "reward.group=true",
        "reward.nodes=all",
    ]  # fmt: skip
    config = load([str(write_run(folder))], [*reward, *words])
    environment = {"PYTHONPATH": str(ROOT), "MRL_SESSION": os.environ["MRL_SESSION"]}
    made = RewardGroup(config, PhaseClock(), environment=environment, log_folder=str(folder / "logs"))
    with made.started([prompt(0)]):
        yield made


def prompt(index: int) -> Prompt:
    return Prompt(index=index, tokens=np.zeros(1, np.int32), text="", ground_truth="1", row=f"rows:{index}")


def pairs(index: int) -> list[tuple[Sample, Prompt]]:
    """Four samples of a prompt, each longer than the one before."""
    sample = trial_sample(prompt(index))
    return [
        (dataclasses.replace(sample, sample_index=n, response_text="x" * n), prompt(index)) for n in range(4)
    ]


class Verdicts(dict[str, Verdict]):
    """What has come, by sample."""

    def __init__(self, rewards: RewardGroup) -> None:
        self._rewards = rewards
        rewards.deliver_to(self.__setitem__)

    def take(self, count: int) -> dict[str, Verdict]:
        """Return the next ones."""
        until(lambda: self._rewards.check() or len(self) >= count)
        return {name: self.pop(name) for name in list(self)}


def processes(*words: str) -> list[psutil.Process]:
    """Those below this one with any of the words in their command."""
    children = psutil.Process().children(recursive=True)
    return [c for c in children if any(word in " ".join(_command(c)) for word in words)]


def _command(process: psutil.Process) -> list[Any]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_group_of_nodes_answers_as_one_pool_and_a_lost_node_is_named(tmp_path: Path) -> None:
    with group(tmp_path) as rewards:
        verdicts = Verdicts(rewards)
        assert processes("raylet")
        assert not processes("dashboard.py", "monitor.py"), "services of Ray that nobody here uses"
        rewards.submit_all(pair for index in range(6) for pair in pairs(index))
        rewards.submit_all(pairs(6)[:2])
        assert {k for k, v in verdicts.take(24).items() if v.value == 1.0} == {f"{n}.3" for n in range(6)}
        assert not verdicts, "the seventh group is not whole"
        rewards.flush_groups([6])
        assert {k: v.value for k, v in verdicts.take(2).items()} == {"6.0": 0.0, "6.1": 1.0}
        (reward,) = processes("mrl.rewards.pool.reward_worker")
        actor = reward.parent()
        assert actor is not None
        reward.suspend()  # so that its actor ends before the verdicts come
        rewards.submit_all(pairs(7))
        os.kill(actor.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="rewards of node 0 died"):
            verdicts.take(4)
        with contextlib.suppress(psutil.NoSuchProcess):
            reward.resume()
    assert not psutil.wait_procs([reward], timeout=60)[1]


def test_a_verifier_that_fails_on_a_node_ends_the_start_with_the_nodes_name(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"rewards of node 0.*no function 'rang'"),
        group(tmp_path, f"reward.path={tmp_path}/plugin.py:rang"),
    ):
        pass
    until(lambda: not processes("mrl.rewards.pool.reward_worker"))
