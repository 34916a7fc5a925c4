"""Faults of a sample are scored; faults of the machine or the verifier are not."""

import collections
from typing import Any, cast

import pytest

from mrl.processes.own_time import PATIENCE_SECONDS
from mrl.processes.worker_process import TimeUsed
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, scored
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.pool.queues import StageQueue
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.work import Cause, Task, Worker
from mrl.rewards.pool.worker_deadlines import GRACE_SECONDS, UNWATCHED_SECONDS
from mrl.rewards.verdict_json import encode_verdict
from mrl.samples import Verdict, VerdictKind
from tests.support.plugin_rewards import plugin


def test_a_sample_that_its_verifier_raises_on_is_wrong_and_the_others_are_untouched(
    make_pair: Any, score_all: Any
) -> None:
    """Only a failure that repeats at the same place, or an oversized reply, counts against the sample."""
    texts = {0: "poison", 3: "fickle", 5: "down", 7: "huge 7"}
    with RewardPool(plugin("raises_on", retries=2)) as pool:
        verdicts = score_all(pool, [make_pair(n, texts.get(n, f"it is {n}"), str(n)) for n in range(10)])
        counts = pool.counts()
    assert {n for n in range(10) if verdicts[f"{n}.0"].value == 1.0} == set(range(10)) - set(texts)
    assert [verdicts[f"{n}.0"].value for n in texts] == [0.0, None, None, 0.0]
    assert "raises on this sample: ValueError" in verdicts["0.0"].reason
    assert "a reply of 9" in verdicts["7.0"].reason
    assert "processes_lost" not in counts


def test_a_verifier_that_raises_on_everything_scores_nothing(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("raises_on", retries=1)) as pool:
        verdicts = score_all(pool, [make_pair(n, "poison", "1") for n in range(4)])
    assert {verdict.kind for verdict in verdicts.values()} == {VerdictKind.NO_REWARD}


def test_samples_that_compute_for_ever_cost_one_deadline_each(make_pair: Any, score_all: Any) -> None:
    """The good samples wait two deadlines at most; one may still run when a bad one's verdict arrives."""
    section = plugin("spins", retries=2, workers=2, deadline_seconds=0.4)
    pairs = [make_pair(n, "spin" if n < 4 else f"it is {n}", str(n)) for n in range(44)]
    order: list[str] = []
    with RewardPool(section) as pool:
        pool.submit_all(pairs)
        verdicts: dict[str, Verdict] = {}
        while len(verdicts) < 44:
            batch = pool.collect(90.0)
            assert batch
            order += [sample_id for sample_id, _ in batch]
            verdicts |= dict(batch)
        counts = pool.counts()
    assert [verdicts[f"{n}.0"].value for n in range(44)] == [0.0] * 4 + [1.0] * 40
    assert counts["processes_lost"] == 4, "an attempt that would be the same again is not made"
    bad = {f"{n}.0" for n in range(4)}
    first_bad = min(order.index(sample_id) for sample_id in bad)
    assert first_bad >= 39, order


class Slow(RewardKind):
    """Keeps its deadline itself, as far as its queue knows."""

    stages = (Stage(keeps_deadline=True),)


@pytest.fixture
def queue() -> StageQueue:
    """Two workers without processes, to test the policy alone."""
    part = KindPart(kind="code", deadline_seconds=10.0)
    section = RewardSection(kind="code", workers=2, retries=2)
    made = StageQueue(Slow(part), Slow.stages[0], section, collections.Counter())
    made.workers = [Worker(cast(Any, None), started=0.0, ready=True) for _ in range(2)]
    return made


def task(name: str, results: dict[str, Verdict | None]) -> Task:
    request = RewardRequest(sample_id=name, group_id=hash(name), response="", ground_truth=None)
    return Task((request,), lambda verdicts: results.update({name: verdicts[0]}))


@pytest.mark.parametrize(
    ("computed", "starved", "is_known", "after", "cause"),
    [
        (0.0, 0.0, True, 10.5, None),  # it waits for its sandbox
        (9.0, 0.0, True, 10.5, None),
        (10.0, 0.0, True, 10.5, Cause.COMPUTED),  # it computes, and does not wait
        (0.0, 0.0, True, 10.5 + GRACE_SECONDS, Cause.DIED),
        (6.0, 0.0, True, 10.5 + GRACE_SECONDS, Cause.COMPUTED),
        (0.0, 20.0, True, 10.5 + GRACE_SECONDS, None),  # it had less time of its own
        (0.0, 99.0, True, 10.5 + GRACE_SECONDS + PATIENCE_SECONDS, Cause.STARVED),
        (0.0, 0.0, False, 10.5 + GRACE_SECONDS, None),  # it waits in a run queue
        (0.0, 0.0, False, 10.5 + GRACE_SECONDS + PATIENCE_SECONDS, Cause.STARVED),
    ],
)
def test_a_worker_over_its_deadline(queue, computed, starved, is_known, after, cause) -> None:
    queue.put(task("a", {}))
    worker, deadlines = queue.workers[0], queue.deadlines
    assert queue.next_batch(worker, 100.0) is not None
    assert not deadlines.starts_to_watch(worker, 99.9 + UNWATCHED_SECONDS), "a short verdict costs no look"
    assert deadlines.starts_to_watch(worker, 101.0) and not deadlines.starts_to_watch(worker, 102.0)
    assert not deadlines.is_late(worker, 110.9) and deadlines.is_late(worker, 111.0)
    worker.used = TimeUsed(computed, starved, is_known)
    fault = deadlines.overdue(worker, 101.0 + after)
    assert (fault and fault.cause) == cause


def test_a_starved_sample_is_tried_once_more_beside_nothing_else(queue: StageQueue) -> None:
    first, second = queue.workers
    verdicts: dict[str, Verdict | None] = {}
    for name in "abc":
        queue.put(task(name, verdicts))
    starving, beside = queue.next_batch(first, 1.0), queue.next_batch(second, 1.0)
    assert starving is not None and beside is not None
    queue.replied(first, {"number": starving.number, "failed": "no processor", "starved": True})
    queue.release_delayed(float("inf"))
    other = queue.next_batch(first, 2.0)
    assert other is not None and other.requests[0].sample_id == "c"
    right = {"verdicts": [encode_verdict(scored(1.0))]}
    queue.replied(first, {"number": other.number} | right)
    assert queue.next_batch(first, 3.0) is None, "another sample still runs"
    queue.replied(second, {"number": beside.number} | right)
    again = queue.next_batch(first, 4.0)
    assert again is not None and again.requests[0].sample_id == "a"
    queue.put(task("d", verdicts))
    assert queue.next_batch(second, 5.0) is None, "nothing is started beside it"
    queue.replied(first, {"number": again.number, "failed": "no processor", "starved": True})
    assert verdicts["a"] is not None and verdicts["a"].kind is VerdictKind.NO_REWARD
    assert "failed 2 times, last: no processor" in verdicts["a"].reason
    assert queue.next_batch(second, 6.0) is not None
