"""Engines on slots of their own: they agree with the trainer, generate while it works, and are named where they die."""

import time
from pathlib import Path

import numpy as np
import pytest

from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
from mrl.launch.commands.fault_injection import InjectedFault, install_faults
from mrl.launch.workers.two_pools import TwoPools
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, Round, Sampling
from mrl.training.batch import pack
from mrl.training.pass_options import PassOptions
from tests.launch.hybrid_runs import agree, groups_of, pairs_of_prompts, running, sampled, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

POOLS = (
    "training.layout={tp: 2, pp: 1, ep: 2, dp: 1}",
    "training.lora={rank: 4, targets: [attention, routed_experts]}",
    "rollout.tp=1",
    "launch.engine_slots=1",
)
"""With adapters, whose updates have to reach engines of other slots too."""
SECONDS = 120.0


def test_a_pool_of_engines_from_its_first_weight_sync_to_a_death_in_one(task: Path, tmp_path: Path) -> None:
    config, clock = tiny_config(task / "model", task, *POOLS), PhaseClock()
    with (
        cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=3),
        running(config, tmp_path / "logs", clock) as pools,
    ):
        assert isinstance(pools, TwoPools)
        agree(pools, config, tmp_path)
        assert_both_work_at_once(pools)
        install_faults([InjectedFault("sync", "engine-0", 1)], pools, clock, tmp_path)
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="engine 0 died in phase sync"), clock.phase("sync"):
            pools.sync(3)
        assert time.monotonic() - started < config.sync.deadline_seconds, (
            "its end was not noticed, only missed"
        )


def assert_both_work_at_once(pools: TwoPools) -> None:
    """Responses arrive while the driver waits for trainer ranks, and what those compute is the same."""
    prompts = pairs_of_prompts()
    batch = pack(groups_of(prompts, sampled(pools, prompts), 2))
    alone = pools.train.forward(batch, PassOptions())["logprobs"]
    found: list[Response] = []

    def pump() -> list:
        found.extend(pools.rollout.take(pools.rollout.ended(0.0)))
        return []

    sampling = Sampling(num_samples=4, temperature=1.0, max_tokens=16, seed=8)
    pools.rollout.submit(Round(tuple(enumerate(prompts)), sampling))
    deadline = time.monotonic() + SECONDS
    with pools.train.meanwhile(pump):
        while len(found) < 4 * len(prompts):
            assert (pools.train.forward(batch, PassOptions())["logprobs"] == alone).all()
            assert time.monotonic() < deadline, f"{len(found)} responses in {SECONDS:g} s"
    assert all((np.asarray(response.policy_versions) == 2).all() for response in found)
