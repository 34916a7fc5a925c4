"""A hybrid engine on real workers for tests: started in this process's Ray, closed at the end."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.root import Config
from mrl.errors import MrlError
from mrl.launch.commands.assemble import hybrid_engine
from mrl.launch.workers.colocated import Hybrid
from mrl.loops.learn import denominators
from mrl.loops.mismatch import measure_mismatch
from mrl.models.layout import Layout
from mrl.observe.phases import PhaseClock
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.rollout.request import Response, Round, Sampling
from mrl.samples import Group
from mrl.training.batch import ages, pack
from mrl.training.hf import export_folder
from mrl.training.hf.hf_folder import read_config
from mrl.training.pass_options import PassOptions
from tests.forks.servers import VARIABLE, shared, starting_workers
from tests.support.samples import make_groups, make_sample, verdict_of
from tests.tiny_models import reference_logprobs


def tiny_config(model: Path, folder: Path, *words: str) -> Config:
    """A two-step configuration over rows and a model made by the fixtures; eager engines, float32."""
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


MEMORY_CAP = 1500 << 20
"""Bytes of a run's trainer ranks and engines (shared pages counted once), for each slot."""


@contextlib.contextmanager
def running(config: Config, log_folder: Path, clock: PhaseClock | None = None) -> Iterator[Hybrid]:
    """Workers up, before the first weight sync. Needs a connected Ray with enough slots."""
    with (
        starting_workers(shared().offer[VARIABLE]),
        hybrid_engine(config, clock or PhaseClock(), log_folder) as hybrid,
    ):
        yield hybrid


def sampled(
    hybrid: Hybrid, prompts: list[np.ndarray], *, greedy: bool = False, seconds: float = 180.0
) -> list[Response]:
    """One response to each prompt, in order."""
    wanted = Round(
        tuple(enumerate(prompts)),
        Sampling(num_samples=1, temperature=1.0, max_tokens=6, seed=7, greedy=greedy),
    )
    hybrid.rollout.submit(wanted)
    found: dict[str, Response] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(prompts):
        found |= {r.request_id: r for r in hybrid.rollout.take(hybrid.rollout.ended(1.0))}
        assert time.monotonic() < deadline, f"{len(found)} of {len(prompts)} responses after {seconds} s"
    return [found[name] for name in wanted.request_ids()]


def poll_to_the_end(hybrid: Hybrid) -> None:
    """Takes all that engines have to give."""
    while hybrid.rollout.under_way():
        hybrid.rollout.take(hybrid.rollout.ended(60.0))


def pairs_of_prompts() -> list[np.ndarray]:
    """Eight short prompts, each twice."""
    rng = np.random.default_rng(0)
    return [p for _ in range(8) for p in [rng.integers(3, 15, int(rng.integers(1, 8))).astype(np.int32)] * 2]


def agree(hybrid: Hybrid, config: Config, tmp_path: Path) -> None:
    """Two updates, each synced; then engines, trainer and an export say the same of new responses. Where the trainer takes the
    engines' routes the two agree at every token; else those are left out at which a router has a near-tie."""
    prompts, replays = pairs_of_prompts(), config.routing.replay == "engine"
    limit = 1e-5 if replays else 1e-4
    hybrid.sync(0)
    for version in range(2):
        groups = groups_of(prompts, sampled(hybrid, prompts), version)
        hybrid.rest()
        batch = pack(groups, with_routes=replays)
        forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
        served = ages(groups, version=version) == 0
        margins = None if replays else forward["router_margin"]
        found = measure_mismatch(batch, forward["logprobs"], margins, served=served, margin=1e-5)
        assert found["policy/rollout_logprob_diff_max"] < limit, found
        batch = batch.with_arrays(old_logprobs=forward["logprobs"])
        batch, _ = shape_and_estimate(config.algorithm, batch, groups)
        metrics = hybrid.train.update(batch, denominators(batch), PassOptions())
        assert metrics["grad_norm"] > 0
        moved = hybrid.sync(version + 1)
        least = least_bytes(config)
        assert (moved["sync/bytes"], moved["sync/whole_bytes"]) == (least, 0), moved
    if config.training.offload == "always":
        with pytest.raises(MrlError, match="parameters are off-loaded"):
            hybrid.train.on_all(lambda actor: actor.worker.policy.memory.export())
    responses = sampled(hybrid, prompts)
    hybrid.rest()
    batch = pack(groups_of(prompts, responses, 2), with_routes=replays)
    forward = hybrid.train.forward(batch, PassOptions(with_router_margins=True))
    shards = str(tmp_path / "shards")
    hybrid.train.on_all(lambda actor: actor.worker.save_weights(shards))
    used = sum(process.memory_full_info().pss for process in workers(hybrid))
    export_folder.export_checkpoint(
        tmp_path / "shards",
        tmp_path / "export",
        source=Path(config.model.path),
        dtype=config.training.dtype,
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


def workers(hybrid: Hybrid) -> list[psutil.Process]:
    """Return the processes of trainer ranks and engines, and those that these started."""
    pids = [*hybrid.train.on_all(lambda _: os.getpid()), *hybrid.rollout.on_all(lambda _: os.getpid())]
    actors = [psutil.Process(pid) for pid in pids]
    return [process for actor in actors for process in (actor, *actor.children(recursive=True))]


def least_bytes(config: Config) -> int:
    """What all engine ranks must have: each element of each parameter once, padding left out. A rank whose part of the vocabulary
    is padding alone is given one row of it, because a loader's copy of nothing counts as one."""
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


def groups_of(prompts: list[np.ndarray], responses: list[Response], version: int) -> list[Group]:
    """Groups of two samples, of each pair of equal prompts; the second one is right."""
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
