"""Calls that last, of engines in real processes that only sleep (benchmarks/driver_stubs.py): who needs them has them at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.driver_stubs import Pace, StubRollout
from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.actor_group import close_all
from mrl.launch.workers.placement import place
from mrl.launch.workers.rollout_group import TICK_STEPS
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, Round, Sampling
from mrl.samples import Prompt, Status
from tests.launch.hybrid_runs import tiny_config

pytestmark = pytest.mark.integration

LONG = 4000
"""Tokens that nothing but a bell ends in a test's time: 40 s of an engine, if nobody rings."""
HOUR = 3600.0


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=2):
        yield


@pytest.fixture
def rollout(task: Path, ray_cluster: None, tmp_path: Path) -> Iterator[StubRollout]:
    """Two engines of four seats; a step takes 10 ms."""
    config = Config.model_validate(
        tiny_config(task / "model", task, "training.layout={tp: 1, pp: 1, ep: 1, dp: 2}").model_dump()
        | {"model": {"path": str(task / "model"), "max_length": 2 * LONG}}
    )
    config = Config.model_validate(
        config.model_dump() | {"rollout": config.rollout.model_dump() | {"max_num_seqs": 4}}
    )
    placement = place(config.num_slots, gpus=False, deadline_seconds=120)
    made = StubRollout(
        config, placement, PhaseClock(), sleeps=False, environment={"OMP_NUM_THREADS": "1"}, log_folder=str(tmp_path)
    )  # fmt: skip
    try:
        made.start_stubs(Pace(engine_step_seconds=0.01, update_seconds=0.0, vocab_size=20))
        made.serve(0)
        heard(made)
        yield made
    finally:
        close_all((made,), deadline_seconds=20)
        placement.remove()


def asked(indices: range, tokens: int) -> Round:
    prompts = [Prompt(i, np.array([4, 5], np.int32), "", None) for i in indices]
    return Round.of(prompts, Sampling(1, 1.0, tokens, seed=0))


def taken(rollout: StubRollout, count: int) -> list[Response]:
    found: list[Response] = []
    while len(found) < count:
        engines = rollout.ended(30.0)
        assert engines, "no call ended"
        found += rollout.take(engines)
    return found


def heard(rollout: StubRollout) -> None:
    """Each engine has answered once, so that its bell is known, and none is at work."""
    rollout.submit(asked(range(900, 902), 1))
    taken(rollout, 2)
    assert rollout.park() == [], "each has a call without requests"
    rollout.go_on()


def test_a_park_rings(rollout: StubRollout) -> None:
    """Both calls under way on each engine end; what has no bell would be waited for to its last token."""
    rollout.be_patient(HOUR)
    rollout.submit(asked(range(4), LONG))
    assert [len(rounds) for rounds in rollout._rounds] == [2, 2]
    parked = rollout.park()
    assert [r.status for r in parked] == [Status.PARKED] * 4
    assert max(len(r.tokens) for r in parked) < LONG


def test_who_loses_patience_rings(rollout: StubRollout) -> None:
    rollout.be_patient(HOUR)
    rollout.submit([asked(range(2), LONG), asked(range(2, 4), TICK_STEPS)])
    assert rollout.ended(0.5) == [], "each engine has something to bring, and keeps it"
    rollout.be_patient(0.0)
    assert sorted(r.request_id for r in taken(rollout, 2)) == ["2.0", "3.0"]


def test_requests_that_find_seats_ring(rollout: StubRollout) -> None:
    """Each engine has two seats free: the calls under way end, so that the next one brings it what was handed in."""
    rollout.be_patient(HOUR, awaited=3)
    rollout.submit(asked(range(10, 14), LONG))
    rollout.submit(asked(range(4), TICK_STEPS))
    assert sorted(r.request_id for r in taken(rollout, 4)) == ["0.0", "1.0", "2.0", "3.0"]
    rollout.park()
