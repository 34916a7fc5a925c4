"""One hybrid engine that stays up: edge cases of the real loop, and many weight syncs without growth."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.data.load_rows import load_data
from mrl.errors import RolloutError, WeightSyncError
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.group_supply import GroupSupply
from mrl.loops.mismatch import measure_mismatch
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.recorder import Recorder
from mrl.observe import metrics_log
from mrl.observe.run_folder import RunFolder
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rollout.request import Completion, GenerationRequest, Sampling, sample_of_completion
from mrl.rollout.seeds import sample_of
from mrl.samples import Group, Prompt
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.batch import first_versions, pack, staleness_of
from mrl.training.pass_options import PassOptions
from tests.launch.hybrid_runs import (
    ChangingRewards,
    LazyEngines,
    ShuffledRewards,
    asked,
    come,
    groups_of,
    pairs_of_prompts,
    paused_after,
    rollouts_of,
    running,
    sampled,
    tiny_config,
    update,
)
from tests.support.samples import verdict_of

pytestmark = pytest.mark.integration

REWARDS = Path(__file__).parent / "rewards.py"


Live = tuple[Config, Hybrid, ChangingRewards]


@pytest.fixture(scope="module")
def live(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start two dp ranks with an engine on each slot, which share their memory in turns."""
    config = tiny_config(
        task / "model",
        task,
        "training.layout={tp: 1, pp: 1, ep: 1, dp: 2}",
        "training.offload=always",
        "routing.replay=engine",
        "algorithm.filter={max_rounds: 2}",
        "loop.validation={every_steps: 0, before_training: false, after_training: false}",
        "loop.checkpoint={every_steps: 0, at_end: false}",
    )
    with (
        cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=2),
        running(
            config, tmp_path_factory.mktemp("live") / "logs", rewards=(rewards := ChangingRewards())
        ) as hybrid,
    ):
        hybrid.sync(0)
        yield config, hybrid, rewards


def run(
    live: Live,
    folder: Path,
    reward: str,
    *,
    steps: int,
    shuffled: bool = False,
    skipped: int = -1,
    **loop: object,
) -> list[dict[str, float]]:
    """Run steps of the real loop and return their rows. `skipped`: the step without a weight sync."""
    config, hybrid, rewards = live
    hybrid.end_generation()
    engines = LazyEngines(hybrid, skipped=hybrid.version + skipped)
    loop |= {"steps": hybrid.version + steps}
    reward = RewardSection.model_validate(
        {"kind": "plugin", "style": "verl", "path": f"{REWARDS}:{reward}", "workers": 1}
    )
    config = Config.model_validate(
        config.model_dump() | {"reward": reward.model_dump(), "loop": config.loop.model_dump() | loop}
    )
    run_folder, tokenizer, rollouts = (
        RunFolder(folder),
        load_tokenizer(config.model.path),
        rollouts_of(hybrid),
    )
    stream = load_data(config.data, config.reward, tokenizer).stream(0)
    supply = GroupSupply(config, stream, Sampling.of(config))
    recorder, checkpoints = (
        Recorder(config, run_folder, rollouts.clock, first_step=0),
        Checkpoints(config, run_folder),
    )
    made = OnPolicyLoop(config, engines, rollouts, supply, [], recorder, checkpoints)
    made.next_step = hybrid.version + 1
    with (
        RewardPool(config.reward, group_size=config.loop.samples_per_prompt) as pool,
        rewards.using(ShuffledRewards(pool, config.loop) if shuffled else pool),
        contextlib.closing(run_folder),
        contextlib.closing(recorder),
    ):
        made.run()
    return metrics_log.read(run_folder.metrics)


def unfiltered(live: Live, **algorithm: object) -> Live:
    """Return the live engine with a configuration without filter and with changed algorithm settings."""
    config, hybrid, rewards = live
    changed = config.algorithm.model_dump() | {"filter": None} | algorithm
    return Config.model_validate(config.model_dump() | {"algorithm": changed}), hybrid, rewards


def test_a_step_whose_groups_are_all_filtered_trains_nothing_and_goes_on(live: Live, tmp_path: Path) -> None:
    before = live[1].version
    rows = run(live, tmp_path, "always_right", steps=2)
    for row in rows:
        assert (row["rollout/groups"], row["group/short"], row["group/rounds"]) == (0, 4, 2)
        assert not any(name.startswith(("optim/", "policy/loss")) for name in row)
    assert live[1].version == before + 2, "every step syncs, also one that trained nothing"


def test_a_rank_without_samples_takes_part(live: Live, tmp_path: Path) -> None:
    """With one prompt and one sample the group teaches nothing, and one rank has no samples."""
    rows = run(
        unfiltered(live, estimator={"name": "reinforce_pp"}),
        tmp_path,
        "even_digits",
        steps=2,
        prompts_per_step=1,
        samples_per_prompt=1,
    )
    assert [row["rollout/samples"] for row in rows] == [1, 1]
    assert all(row["optim/skipped"] == 0 and row["optim/grad_norm"] < 1e-6 for row in rows)


def test_prompts_of_one_token_and_at_the_limit(live: Live) -> None:
    """Trainer and engines agree on prompts of length 1 up to the longest that allows a response."""
    config, hybrid, _ = live
    longest = config.model.max_length - config.rollout.max_response_tokens
    rng = np.random.default_rng(1)
    prompts = [
        p for n in (1, longest, 2, 17, longest - 1, 1) for p in [rng.integers(3, 15, n).astype(np.int32)] * 2
    ]
    responses = sampled(hybrid, prompts)
    hybrid.end_generation()
    groups = groups_of(prompts, responses, hybrid.version)
    batch, served = pack(groups), staleness_of(groups, version=hybrid.version) == 0
    loads = [batch.lengths()[part].sum() for part in hybrid.train.dealer(batch)[1]]
    assert max(loads) > min(loads), "the lengths were to be uneven"
    forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
    stats = measure_mismatch(batch, forward["logprobs"], forward["router_margin"], served=served, margin=1e-5)
    assert stats["policy/rollout_logprob_diff_max"] < 1e-4, stats
    hybrid.sync(hybrid.version + 1)
    too_long = GenerationRequest("0.0", rng.integers(3, 15, longest + 1).astype(np.int32), 7, 6)
    with pytest.raises(RolloutError, match="together at most model"):
        hybrid.rollout.on_all(RolloutActor.on_engine, lambda engine: engine.submit([too_long]))


def test_a_loop_learns_after_all_that(live: Live, tmp_path: Path) -> None:
    rows = run(live, tmp_path, "even_digits", steps=2)
    assert all(row["optim/grad_norm"] > 0 and row["policy/rollout_logprob_diff_max"] < 1e-5 for row in rows)
    assert all(row["policy/rollout_logprob_near_ties"] == row["routing/rows_missing"] == 0 for row in rows)
    assert all(row["routing/agreement"] > 0.99 for row in rows)


LEARNING_STEPS = 16
MARGIN = 0.1
"""Least gain of a reward that is a share."""


def test_rewards_teach_and_shuffled_rewards_do_not(live: Live, tmp_path: Path) -> None:
    """The reward rises from random weights, but not with shuffled verdicts (see benchmarks/learning.py)."""
    (config, hybrid, _), gains = live, {}
    for shuffled in (False, True):
        hybrid.end_generation()
        hybrid.train.on_all(lambda actor, path=config.model.path: actor.worker.policy.load_hf(path))
        hybrid.sync(hybrid.version + 1)
        size = {"prompts_per_step": 8, "samples_per_prompt": 8}
        rows = run(
            unfiltered(live),
            tmp_path / str(shuffled),
            "even_digits",
            steps=LEARNING_STEPS,
            shuffled=shuffled,
            **size,
        )
        means = [row["reward/mean"] for row in rows]
        gains[shuffled] = np.mean(means[-4:]) - np.mean(means[:4])
    assert gains[False] > MARGIN and gains[True] < MARGIN / 2, gains


def test_a_skipped_weight_sync_is_caught_by_the_mismatch_check(live: Live, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="engines do not serve the trainer's weights"):
        run(live, tmp_path, "even_digits", steps=4, skipped=2)
    live[1].sync(live[1].version + 1)


def test_each_token_has_the_log_prob_of_its_own_version_in_megatron(live: Live, tmp_path: Path) -> None:
    """Each version's saved weights reproduce the engine's log-probs of its own tokens only.

    Two updates interrupt the responses. With the engine's routes near-ties count too."""
    (config, hybrid, _), count = live, 24
    rng = np.random.default_rng(4)
    prompts = [Prompt(i, rng.integers(3, 15, 4).astype(np.int32), "", None) for i in range(100, 100 + count)]
    sampling, some = Sampling(num_samples=1, temperature=1.0, max_tokens=24, seed=7), count * 3 // 4
    saved: dict[int, Path] = {}
    others = groups_of(pairs_of_prompts(), sampled(hybrid, pairs_of_prompts()), hybrid.version)
    early = late = asked(hybrid, sampling.requests(prompts[:some]))
    for number in range(2):
        interrupted = paused_after(hybrid, 6)
        assert interrupted.num_requests > count // 4 and interrupted.num_tokens > 4 * count // 4
        save(hybrid, saved, tmp_path)
        batch = pack(others, with_routes=True)
        logprobs = hybrid.train.forward(batch, PassOptions())["logprobs"]
        update(hybrid, config, batch.with_arrays(old_logprobs=logprobs), others)
        hybrid.sync(hybrid.version + 1)
        if number == 0:
            late = asked(hybrid, sampling.requests(prompts[some:]))
    whole = come(hybrid, early) + come(hybrid, late)
    save(hybrid, saved, tmp_path)
    differences = gaps(hybrid, prompts, whole, saved)
    hybrid.sync(hybrid.version + 1)
    versions = list(saved)
    assert {completion.segments[0].version for completion in early.result()} == {versions[0]}
    assert min(completion.segments[0].version for completion in late.result()) == versions[1]
    assert np.mean([len(completion.segments) > 1 for completion in whole]) > 0.3
    assert max(len(completion.segments) for completion in whole) == 3
    for version in versions:
        matching = differences[version, version]
        assert matching["policy/rollout_logprob_diff_max"] < 1e-4, (version, matching)
        for other in set(versions) - {version}:
            shifted = differences[other, version]["policy/rollout_logprob_diff_mean"]
            assert shifted > 10 * matching["policy/rollout_logprob_diff_mean"], (version, other, differences)


def save(hybrid: Hybrid, saved: dict[int, Path], folder: Path) -> None:
    """Bring the trainer back and save the version that engines serve."""
    hybrid.end_generation()
    saved[hybrid.version] = folder / str(hybrid.version)
    hybrid.train.save_checkpoint(saved[hybrid.version], {}, beside=False)


def gaps(
    hybrid: Hybrid, prompts: list[Prompt], whole: list[Completion], saved: dict[int, Path]
) -> dict[tuple[int, int], dict[str, float]]:
    """Return (version of the weights, version of the tokens) -> mismatch of Megatron and the engines."""
    by_index = {p.index: p for p in prompts}
    samples = [
        sample_of_completion(by_index[sample_of(r.request_id)[0]], 0, r).with_verdict(verdict_of(0.0))
        for r in whole
    ]
    groups = [Group(by_index[s.prompt_index], (s,)) for s in samples]
    batch, newest, differences = pack(groups), max(saved), {}
    age = staleness_of(groups, version=newest)
    hybrid.end_generation()
    for version, folder in saved.items():
        hybrid.train.load_checkpoint(folder)
        forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
        margins = forward["router_margin"]
        for tokens_of in saved:
            differences[version, tokens_of] = measure_mismatch(
                batch, forward["logprobs"], margins, served=age == newest - tokens_of, margin=1e-5
            )
        began = (age == newest - version) & (first_versions(groups) == version)
        taken = hybrid.train.forward(pack(groups, with_routes=True), PassOptions())
        if began.any():  # the last version began none
            routed = measure_mismatch(batch, taken["logprobs"], None, served=began, margin=0.0)
            assert routed["policy/rollout_logprob_diff_max"] < 1e-5, (version, routed)
    return differences


WARM_UP = 6
"""Weight syncs until every pool and cache has its final size."""
MORE_THREADS = 4
"""Ray's thread pools grow on a busy machine; a leak is at least one thread per weight sync."""
PRIVATE_GROWTH = 24 << 20
"""Private bytes that a process may gain over all counted weight syncs (a bucket alone is 1 MiB)."""


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_weight_syncs_do_not_grow(count: int, live: Live) -> None:
    """Repeat the memory handover between trainer and engines and the weight sync."""
    _, hybrid, _ = live
    processes = [psutil.Process(pid) for pid in pids_of(hybrid)]
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (1, 4, 7)]
    before: dict[int, dict[str, int]] = {}
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before = {p.pid: usage(p) for p in processes}
        hybrid.end_generation()
        hybrid.sync(hybrid.version + 1)
        sampled(hybrid, prompts, greedy=True)
    for process in processes:
        after, first = usage(process), before[process.pid]
        growth, threads = (after.pop(name) - first.pop(name) for name in ("private", "threads"))
        assert after == first, f"{process.cmdline()[:1]}: {first} became {after} in {count} weight syncs"
        assert threads <= MORE_THREADS < count, f"{process.cmdline()[:1]} has {threads} threads more"
        assert growth < PRIVATE_GROWTH, (
            f"{process.cmdline()[:1]} gained {growth >> 10} KiB in {count} weight syncs"
        )


def pids_of(hybrid: Hybrid) -> list[int]:
    import ray

    actors = [*hybrid.train.actors, *hybrid.rollout.actors]
    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors], timeout=240)


def usage(process: psutil.Process) -> dict[str, int]:
    """Return descriptors, threads, mapped shared segments and private bytes."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "segments": len(re.findall(r"/memfd:|/dev/shm/|\(deleted\)", maps)),
        "private": process.memory_full_info().uss,
    }
