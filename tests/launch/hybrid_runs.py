"""A hybrid engine on real workers for tests: started in this process's Ray, closed at the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.root import Config
from mrl.config.sections.loop import LoopSection
from mrl.errors import MrlError
from mrl.launch.commands.start_run import hybrid_engine, in_driver, rollout_thread
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.loops.learn import denominators
from mrl.loops.mismatch import measure_mismatch
from mrl.loops.rollout_thread import RolloutThread
from mrl.models.layout import Layout
from mrl.observe.phases import PhaseClock
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rollout.engine_pool import PauseTotals
from mrl.rollout.request import Completion, GenerationRequest, Sampling
from mrl.samples import Group, Prompt, Sample, TrainBatch, Verdict
from mrl.training.batch import pack, staleness_of
from mrl.training.hf import export_folder
from mrl.training.hf.hf_folder import read_config
from mrl.training.pass_options import PassOptions
from mrl.trajectories.rewards import Deliver, RewardWorkers
from tests.forks.servers import VARIABLE, shared, starting_workers
from tests.support.samples import make_groups, make_sample, verdict_of
from tests.tiny_models import reference_logprobs


def tiny_config(model: Path, folder: Path, *words: str) -> Config:
    """Return a two-step configuration over the fixtures' rows and model; eager engines, float32."""
    from mrl.config.load import load

    return load(
        [],
        [
            "run.name=run", f"run.folder={folder}", f"model.path={model}", "model.max_length=32",
            "data.max_prompt_tokens=16", f"data.train={folder}/train.jsonl",
            f"data.validation={folder}/validation.jsonl", "reward.kind=maths",
            "reward.maths.extraction=[whole_response]", "reward.maths.symbolic=false", "reward.workers=1",
            "training.dtype=float32", "training.optimizer.lr=1e-3", "rollout.dtype=float32",
            "rollout.enforce_eager=true", "rollout.max_response_tokens=6",
            "rollout.kv_cache_bytes=33554432", "sync.bucket_bytes=1048576", "sync.deadline_seconds=120",
            "loop.steps=2", "loop.prompts_per_step=4", "loop.samples_per_prompt=4",
            "loop.validation.num_prompts=8", "loop.max_rollout_mismatch=1e-4",
            "loop.phase_deadline_seconds=120", *words,
        ],
    )  # fmt: skip


Future = concurrent.futures.Future[list[Completion]]
"""Completions of requests, in order."""
MEMORY_CAP = 1500 << 20
"""Bytes per slot of a run's trainer ranks and engines; shared pages count once."""


class ChangingRewards:
    """Reward workers that can change between runs over the same engines; at first there are none."""

    workers: RewardWorkers | None = None

    def deliver_to(self, deliver: Deliver) -> None:
        self._deliver = deliver

    @contextlib.contextmanager
    def using(self, workers: RewardWorkers) -> Iterator[None]:
        workers.deliver_to(self._deliver)
        self.workers = workers
        yield
        self.workers = None

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        assert self.workers is not None
        self.workers.submit_all(pairs)

    def flush_groups(self, prompts: Collection[int]) -> None:
        assert self.workers is not None
        self.workers.flush_groups(prompts)

    def check(self) -> None: ...


class ShuffledRewards:
    """Shuffles the real verdicts among the samples of a round, in the same way in every run."""

    def __init__(self, pool: RewardPool, section: LoopSection, *, validated: int = 0) -> None:
        """`validated`: number of prompts of a validation."""
        self._pool, self._random, self._lock = pool, random.Random(0), threading.Lock()
        self._validated = validated
        self._size = section.prompts_per_step * section.samples_per_prompt
        self._held: list[tuple[str, Verdict]] = []
        self.submit_all, self.flush_groups, self.check = pool.submit_all, pool.flush_groups, pool.check

    def deliver_to(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._pool.deliver_to(self._hold)

    def _hold(self, name: str, verdict: Verdict) -> None:
        """Deliver verdicts when the round is complete; prompts of a validation have negative indices."""
        with self._lock:
            self._held.append((name, verdict))
            if len(self._held) < (self._validated if name.startswith("-") else self._size):
                return
            held, self._held = sorted(self._held, key=lambda named: named[0]), []  # by name, not arrival
            values = [v for _, v in held]
            self._random.shuffle(values)
        for (held_name, _), value in zip(held, values, strict=True):
            self._deliver(held_name, value)


class LazyEngines:
    """The hybrid engine, except that one weight sync never happens."""

    def __init__(self, hybrid: Hybrid, *, skipped: int) -> None:
        self._hybrid, self.train, self._skipped = hybrid, hybrid.train, skipped

    def end_generation(self) -> None:
        self._hybrid.end_generation()

    def transfer(self, version: int) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> dict[str, float]:
        return {} if version == self._skipped else self._hybrid.sync(self._hybrid.version + 1)


@contextlib.contextmanager
def running(
    config: Config, log_folder: Path, clock: PhaseClock | None = None, rewards: ChangingRewards | None = None
) -> Iterator[Hybrid]:
    """Start workers and their rollout thread, without a weight sync. Needs Ray with enough slots."""
    clock = clock or PhaseClock()
    with (
        starting_workers(shared().offer[VARIABLE]),
        hybrid_engine(config, clock, log_folder) as hybrid,
        contextlib.closing(
            rollout_thread(config, in_driver(config, hybrid, rewards or ChangingRewards(), None, None), clock)
        ) as rollouts,
    ):
        hybrid.rollout.attach(rollouts)
        yield hybrid


def rollouts_of(hybrid: Hybrid) -> RolloutThread:
    """Return the rollout thread of the engines."""
    rollouts = hybrid.rollout._rollouts
    assert isinstance(rollouts, RolloutThread)
    return rollouts


def requests_for(
    prompts: Sequence[np.ndarray], sampling: Sampling, first: int = 0
) -> list[GenerationRequest]:
    """Return one request per sample of each prompt; prompts are numbered from `first`."""
    return sampling.requests([Prompt(n, tokens, "", None) for n, tokens in enumerate(prompts, first)])


def asked(hybrid: Hybrid, requests: Sequence[GenerationRequest]) -> Future:
    """Submit requests to the engines, paused or not; return the future of their completions, in order."""
    rollouts = rollouts_of(hybrid)

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*map(rollouts.engines.generate, requests))

    return asyncio.run_coroutine_threadsafe(all_of_them(), rollouts._aio)


def come(hybrid: Hybrid, future: Future, seconds: float = 180.0) -> list[Completion]:
    """Let the engines step until the future is done, then pause them; return the completions."""

    async def awaited() -> list[Completion]:
        return await asyncio.wrap_future(future)

    rollouts = rollouts_of(hybrid)
    rollouts.resume()
    completions = rollouts.do(awaited(), seconds)
    rollouts.pause()
    return completions


def paused_after(hybrid: Hybrid, steps: int) -> PauseTotals:
    """Pause the engines after about this many steps; return how much the pause interrupted."""
    rollouts, group = rollouts_of(hybrid), hybrid.rollout

    def pause(actor: RolloutActor, target: int) -> tuple[int, int]:
        while actor.loop.num_steps < target:
            time.sleep(0.001)
        paused = actor.loop.pause().result()
        return paused.num_requests, paused.num_tokens

    targets = [steps + made for made in group.on_all(lambda actor: actor.loop.num_steps)]
    calls = {group.name(n): group.start_on(n, pause, target) for n, target in enumerate(targets)}
    rollouts.resume()
    totals = group.wait(calls).values()
    rollouts.pause(snapshot=True)
    return PauseTotals(*map(sum, zip(*totals, strict=True)))


def sampled(hybrid: Hybrid, prompts: list[np.ndarray], *, greedy: bool = False) -> list[Completion]:
    """Generate one completion per prompt, in order."""
    sampling = Sampling(num_samples=1, temperature=1.0, max_tokens=6, seed=7, greedy=greedy)
    return come(hybrid, asked(hybrid, requests_for(prompts, sampling)))


def long_requests() -> list[GenerationRequest]:
    sampling = Sampling(num_samples=4, temperature=1.0, max_tokens=16, seed=7)
    return requests_for(pairs_of_prompts(), sampling)


def pairs_of_prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [p for _ in range(8) for p in [rng.integers(3, 15, int(rng.integers(1, 8))).astype(np.int32)] * 2]


def agree(hybrid: Hybrid, config: Config, tmp_path: Path) -> None:
    """Check that engines, trainer and export agree after two synced updates, except at near-ties."""
    prompts, replays = pairs_of_prompts(), config.routing.replay == "engine"
    limit = 1e-5 if replays else 1e-4
    hybrid.sync(0)
    for version in range(2):
        groups = groups_of(prompts, sampled(hybrid, prompts), version)
        hybrid.end_generation()
        batch = pack(groups, with_routes=replays)
        forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
        served = staleness_of(groups, version=version) == 0
        margins = None if replays else forward["router_margin"]
        mismatch = measure_mismatch(batch, forward["logprobs"], margins, served=served, margin=1e-5)
        assert mismatch["policy/rollout_logprob_diff_max"] < limit, mismatch
        update(hybrid, config, batch.with_arrays(old_logprobs=forward["logprobs"]), groups)
        moved = hybrid.sync(version + 1)
        least = least_bytes(config)
        assert (moved["sync/bytes"], moved["sync/whole_bytes"]) == (least, 0), moved
    if config.training.offload == "always":
        with pytest.raises(MrlError, match="parameters are off-loaded"):
            hybrid.train.on_all(lambda actor: actor.worker.policy.memory.export())
    responses = sampled(hybrid, prompts)
    hybrid.end_generation()
    batch = pack(groups_of(prompts, responses, 2), with_routes=replays)
    forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
    shards = str(tmp_path / "shards")
    hybrid.train.on_all(lambda actor: actor.worker.save_weights(shards))
    used = sum(process.memory_full_info().pss for process in workers(hybrid))
    export_folder.export_checkpoint(
        tmp_path / "shards", tmp_path / "export", source=Path(config.model.path), dtype=config.training.dtype
    )
    assert used < MEMORY_CAP * config.num_slots, f"{used >> 20} MiB"
    clear = batch.loss_mask & (forward["router_margin"] > 1e-5)
    assert clear.sum() > 20
    reference, _ = reference_logprobs(tmp_path / "export", batch)
    rollout = batch.arrays["rollout_logprobs"]
    compared = batch.loss_mask if replays else clear
    assert np.abs(rollout - forward["logprobs"])[compared].max() < limit
    assert np.abs(reference - forward["logprobs"])[clear].max() < 1e-4
    assert np.abs(reference_logprobs(Path(config.model.path), batch)[0] - reference)[clear].max() > 1e-3, (
        "the updates changed nothing"
    )


def update(hybrid: Hybrid, config: Config, batch: TrainBatch, groups: list[Group]) -> None:
    """Update the trainer's weights with packed groups that have old log-probs."""
    batch, _ = shape_and_estimate(config.algorithm, batch, groups)
    assert hybrid.train.update(batch, denominators(batch), PassOptions())["grad_norm"] > 0


def workers(hybrid: Hybrid) -> list[psutil.Process]:
    """Return the processes of trainer ranks and engines, and their children."""
    pids = [*hybrid.train.on_all(lambda _: os.getpid()), *hybrid.rollout.on_all(lambda _: os.getpid())]
    actors = [psutil.Process(pid) for pid in pids]
    return [process for actor in actors for process in (actor, *actor.children(recursive=True))]


def least_bytes(config: Config) -> int:
    """Return the bytes of a sync: each element once, no padding; a rank of padding alone gets one row."""
    rollout = config.rollout
    layout = Layout(tp=rollout.tp, dp=len(config.engine_slots) // rollout.tp, ep=rollout.ep)
    manifests = engine_manifests.engine_rank_manifests(
        read_config(config.model.path), layout, dtype=rollout.dtype
    )
    tensors = [tensor for manifest in manifests for tensor in manifest.tensors]
    return sum(
        DTYPE_BYTES[t.dtype] * (sum(math.prod(p.shape) for p in t.pieces) or math.prod(t.shape[1:]))
        for t in tensors
    )


def groups_of(prompts: list[np.ndarray], responses: list[Completion], version: int) -> list[Group]:
    """Return one group per pair of equal prompts; only the second of its two samples is correct."""
    samples = [
        make_sample(
            number - number % 2,
            number % 2,
            prompt_tokens=prompt,
            response_tokens=response.tokens,
            loss_mask=np.ones(len(response.tokens), np.bool_),
            rollout_logprobs=response.logprobs,
            policy_versions=response.policy_versions,
            status=response.status,
            routes=response.routes,
            verdict=verdict_of(float(number % 2)),
        )
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    assert all((s.policy_versions == version).all() for s in samples)
    return make_groups(samples)
