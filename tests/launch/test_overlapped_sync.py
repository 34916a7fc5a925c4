"""Engines on their own slots take new weights while they generate, and stop only to load them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.loops.mismatch import measure_mismatch
from mrl.training.batch import pack, staleness_of
from mrl.training.pass_options import PassOptions
from tests.launch.hybrid_runs import (
    asked,
    come,
    groups_of,
    long_requests,
    pairs_of_prompts,
    rollouts_of,
    running,
    sampled,
    tiny_config,
    update,
)
from tests.support.samples import make_groups, make_sample, verdict_of

pytestmark = pytest.mark.integration

STEPS = 3
"""Engine steps that a transfer lasts at least."""


@pytest.fixture(scope="module")
def config(task: Path) -> Config:
    return tiny_config(
        task / "model",
        task,
        "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}",
        "launch.engine_slots=1",
        "rollout.max_num_seqs=4",
        "loop.schedule=stream",
        "stream.max_staleness=1",
        "sync.transport=distributed",
        "sync.bucket_bytes=65536",
    )


@pytest.fixture(scope="module")
def pools(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    with (
        cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=2),
        running(config, tmp_path_factory.mktemp("pools") / "logs") as hybrid,
    ):
        yield hybrid


def outlast_steps(actor: RolloutActor, steps: int) -> None:
    """Let this engine take the next session's second window only after it has made some more steps."""
    from mrl.resharding.transfer.receiver import Receiver

    take = Receiver._window

    def taken(receiver: Receiver, conversation: Any, size: int, expected: int) -> Any:
        begun, deadline = actor.loop.num_steps, time.monotonic() + 100
        if expected == 1:
            Receiver._window = take  # type: ignore[method-assign]
            while actor.loop.num_steps < begun + steps:
                assert time.monotonic() < deadline, "the engine does not step during the transfer"
                time.sleep(0.001)
        return take(receiver, conversation, size, expected)

    Receiver._window = taken  # type: ignore[method-assign]


def test_tokens_have_the_version_that_drew_them_and_engines_step_during_the_transfer(
    config: Config, pools: Hybrid
) -> None:
    """Tokens after the switch agree with the trainer's new weights, those during the transfer do not."""
    pools.sync(0)
    prompts = pairs_of_prompts()
    groups = groups_of(prompts, sampled(pools, prompts), 0)
    batch = pack(groups)
    old = pools.train.forward(batch, PassOptions())["logprobs"]
    update(pools, config, batch.with_arrays(old_logprobs=old), groups)
    pools.rollout.on_all(outlast_steps, STEPS)
    future = asked(pools, long_requests())
    rollouts = rollouts_of(pools)
    rollouts.resume()
    assert pools.transfer(1).keys() == {"sync/transfer_seconds"}
    assert not future.done(), "the engine had too little to do"
    assert pools.version == 0
    rollouts.pause()
    metrics = pools.sync(1)
    assert metrics["sync/steps_meanwhile"] >= STEPS and pools.version == 1
    completions = come(pools, future)
    versions = [completion.policy_versions for completion in completions]
    assert any(set(v.tolist()) == {0, 1} for v in versions), "the sync interrupted no response"
    assert all(np.isin(v, (0, 1)).all() and (np.diff(v) >= 0).all() for v in versions)
    samples = [
        make_sample(
            n // 4,
            n % 4,
            prompt_tokens=request.prompt_tokens,
            response_tokens=completion.tokens,
            loss_mask=np.ones(len(completion.tokens), np.bool_),
            rollout_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            status=completion.status,
            verdict=verdict_of(0.0),
        )
        for n, (request, completion) in enumerate(zip(long_requests(), completions, strict=True))
    ]
    groups = make_groups(samples)
    batch = pack(groups)
    forward = pools.train.forward(batch, PassOptions(with_router_margins=True))
    stale = staleness_of(groups, version=1)
    differences = [
        measure_mismatch(
            batch, forward["logprobs"], forward["router_margin"], served=stale == age, margin=1e-5
        )
        for age in (0, 1)
    ]
    new, earlier = (d["policy/rollout_logprob_diff_max"] for d in differences)
    assert new < 1e-4 < 1e-3 < earlier


def test_a_transfer_that_is_not_loaded_is_replaced_by_the_next_sync(pools: Hybrid) -> None:
    """The driver may change its mind between the two: the engine then takes everything anew."""
    version = pools.version
    assert pools.transfer(version + 1)
    pools._transferred = None  # type: ignore[attr-defined]
    assert "sync/steps_meanwhile" not in pools.sync(version + 1)
    assert pools.transfer(version + 2) and "sync/steps_meanwhile" in pools.sync(version + 2)
