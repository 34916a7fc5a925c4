"""Many episodes of an environment that fails in every way: each fault is counted once, none is scored."""

from __future__ import annotations

import collections
import random
import time

import psutil
import pytest

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import EndedBy
from mrl.agents.pool import EnvironmentWorkers
from tests.support.environments import FILE
from tests.support.processes import children

STEP_SECONDS = 5.0
IN_A_HUNDRED = {"raise": 3, "hang": 2, "exit": 2, "huge": 1, "nan": 1}
COUNTED = {"raise": "raised", "hang": "deadline", "exit": "exited", "huge": "oversized", "nan": "reward"}
PATIENCE = 300.0


def faults_of(episodes: int) -> list[str]:
    faults = [fault for fault, share in IN_A_HUNDRED.items() for _ in range(share * episodes // 100)]
    faults += [""] * (episodes - len(faults))
    random.Random(0).shuffle(faults)
    return faults


def played(
    pool: EnvironmentWorkers, faults: list[str], open_at_once: int
) -> dict[str, list[EnvironmentResult]]:
    """Play all episodes to their ends; return the answers of each."""
    waiting = collections.deque(enumerate(faults))
    answers: dict[str, list[EnvironmentResult]] = {}
    heard = time.monotonic()
    while waiting or pool.num_open:
        while waiting and pool.num_open < open_at_once:
            number, fault = waiting.popleft()
            answers[str(number)] = []
            pool.open(str(number), "faulty", {"fault": fault, "at": 1 + number % 3}, number)
        for answer in pool.poll(1.0):
            heard = time.monotonic()
            answers[answer.key].append(answer)
            pool.step(answer.key, "go") if answer.ended_by is None else pool.close(answer.key)
        assert time.monotonic() < heard + PATIENCE, "nothing is heard any more"
    return answers


def held(pid: int) -> int:
    """Return a process's resident bytes, with pages shared with environments just forked or ended."""
    return psutil.Process(pid).memory_info().rss


@pytest.mark.parametrize("episodes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_faults_are_counted_and_never_scored(episodes: int) -> None:
    faults = faults_of(episodes)
    deadlines = Deadlines(reset_seconds=STEP_SECONDS, step_seconds=STEP_SECONDS, close_seconds=1.0)
    with EnvironmentWorkers({"faulty": EnvironmentSpec(FILE + "Faulty")}, deadlines) as pool:
        played(pool, [""] * 32, 32)
        (host,) = children("mrl.agents.environment_host")
        before = held(host.pid)
        results = played(pool, faults, 32)
        grown = held(host.pid) - before
        counts = dict(pool.faults())
    assert counts == {COUNTED[fault]: count * episodes // 100 for fault, count in IN_A_HUNDRED.items()}
    for number, fault in enumerate(faults):
        *before_last, last = results[str(number)]
        assert all(answer.ended_by is None for answer in before_last)
        if not fault:
            assert last.ended_by is EndedBy.ENV_DONE and last.turn == 3 and last.reward == 1.0
            continue
        assert last.ended_by is not None and last.ended_by.is_infrastructure_failure, "never scored"
        assert last.fault is not None and last.fault.value == COUNTED[fault] and last.reward is None
        assert last.turn == 1 + number % 3
    assert max(answer.seconds for answers in results.values() for answer in answers) <= 2 * STEP_SECONDS
    assert grown < 4 * 2**20, f"the host holds {grown} bytes more"
    assert not host.is_running() or host.status() == psutil.STATUS_ZOMBIE
