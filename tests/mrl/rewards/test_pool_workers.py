"""The pool's queue and processes: room, turns, replacement, and an end with the parent."""

import collections
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from mrl.errors import RewardError
from mrl.rewards.contract import RewardRequest
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool import queues
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.work import Task, Worker
from tests.support.plugin_rewards import PLUGINS, plugin
from tests.support.processes import children


def test_a_full_queue_makes_submit_wait_with_a_deadline(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.rewards.pool.reward_pool.QUEUE_LIMIT", 2)
    with RewardPool(plugin("dies_of", deadline_seconds=30)) as pool:
        pool.submit(*make_pair(0, "hang", "1"))
        pool.submit(*make_pair(1, "hang", "1"))
        with pytest.raises(RewardError, match="2 samples are waiting"):
            pool.submit(*make_pair(2, "x", "1"), deadline_seconds=0.2)


def test_more_samples_at_once_than_the_queue_holds(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first samples run while the caller waits for room."""
    monkeypatch.setattr("mrl.rewards.pool.reward_pool.QUEUE_LIMIT", 3)
    with RewardPool(plugin("native")) as pool:
        pool.submit_all((make_pair(n, "1", "1") for n in range(20)), deadline_seconds=60.0)
        collected: list[tuple[str, Any]] = []
        while len(collected) < 20:
            collected += pool.collect(60.0)
    assert {sample_id for sample_id, _ in collected} == {f"{n}.0" for n in range(20)}


def test_groups_take_turns(make_pair: Any) -> None:
    """A prompt with many samples does not delay another prompt's only one."""
    with RewardPool(plugin("native")) as pool:
        for s in range(300):
            pool.submit(*make_pair(0, "1", "1", sample_index=s))
        pool.submit(*make_pair(1, "1", "1"))
        order: list[str] = []
        while len(order) < 301:
            order += [sample_id for sample_id, _ in pool.collect(60.0)]
    assert order.index("1.0") < 10


def test_a_killed_worker_is_replaced(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("native")) as pool:
        score_all(pool, [make_pair(0, "1", "1")])
        (worker,) = children("mrl.rewards.pool.reward_worker")
        os.kill(worker.pid, signal.SIGKILL)
        verdicts = score_all(pool, [make_pair(1, "1", "1")])
        assert verdicts["1.0"].value == 1.0
        assert pool.counts()["processes_lost"] == 1


def test_workers_are_recycled(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("native", tasks_per_worker=2)) as pool:
        score_all(pool, [make_pair(n, "1", "1") for n in range(3)])
        pids = {worker.pid for worker in children("mrl.rewards.pool.reward_worker")}
        score_all(pool, [make_pair(10 + n, "1", "1") for n in range(2)])
        later = {worker.pid for worker in children("mrl.rewards.pool.reward_worker")}
    assert len(pids) == len(later) == 1 and pids.isdisjoint(later)


def test_a_worker_of_cheap_checks_is_spent_by_batches_not_by_samples() -> None:
    """A new process for every 2,000 samples took two thirds of the exact path's time."""
    section = RewardSection(kind="maths", tasks_per_worker=3)
    queue = queues.queues_of(reward_kind(section), section, collections.Counter())
    worker = Worker(cast(Any, None), started=0.0, ready=True)
    size = queue.stage.batch_size
    for n in range(4 * size):
        request = RewardRequest(sample_id=f"{n}.0", group_id=n, response=f"#### {n}", ground_truth=str(n))
        queue.put(Task((request,), lambda verdicts: None))
    for _ in range(3):
        assert not queue.is_spent(worker)
        batch = queue.next_batch(worker, 0.0)
        assert batch is not None and len(batch.tasks) == size
        worker.running.clear()
    assert queue.is_spent(worker) and queue.next_batch(worker, 0.0) is None


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """After SIGKILL of the parent a hanging verifier ends within seconds."""
    script = textwrap.dedent(
        f"""
        import sys, numpy as np
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from mrl.rewards.kinds.reward_section import RewardSection
        from mrl.rewards.pool.reward_pool import RewardPool
        from mrl.rewards.pool.trial import trial_sample
        from mrl.samples import Prompt
        import time, psutil
        pool = RewardPool(RewardSection(kind="plugin", path={PLUGINS + ":dies_of"!r}, deadline_seconds=100))
        prompt = Prompt(index=0, tokens=np.zeros(1, np.int32), text="", ground_truth="1")
        pool.submit(trial_sample(prompt, "1"), prompt)
        pool.collect(60)
        pool.submit(trial_sample(prompt, "hang"), prompt)
        time.sleep(0.3)
        assert "torch" not in sys.modules
        print(*[c.pid for c in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(100)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert workers
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
