"""A hybrid engine on real workers for tests: started in this process's Ray, closed at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.launch.commands.assemble import hybrid_engine
from mrl.launch.workers.colocated import Hybrid
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, Round, Sampling
from mrl.samples import Group
from tests.support.samples import make_groups, make_sample, verdict_of


def tiny_config(model: Path, folder: Path, *words: str) -> Config:
    """A two-step configuration over rows and a model made by the fixtures; eager engines, float32."""
    from mrl.config.load import load

    return load(
        [],
        [
            "run.name=run",
            f"run.folder={folder}",
            f"model.path={model}",
            "model.max_length=32",
            "data.max_prompt_tokens=16",
            f"data.train={folder}/train.jsonl",
            f"data.validation={folder}/validation.jsonl",
            "reward.kind=maths",
            "reward.maths.extraction=[whole_response]",
            "reward.maths.symbolic=false",
            "reward.workers=1",
            "training.dtype=float32",
            "training.optimizer.lr=1e-3",
            "rollout.dtype=float32",
            "rollout.enforce_eager=true",
            "rollout.max_response_tokens=6",
            "rollout.kv_cache_bytes=33554432",
            "sync.bucket_bytes=1048576",
            "sync.deadline_seconds=60",
            "loop.steps=2",
            "loop.prompts_per_step=4",
            "loop.samples_per_prompt=4",
            "loop.validation.num_prompts=8",
            "loop.max_rollout_mismatch=1e-4",
            "loop.phase_deadline_seconds=120",
            *words,
        ],
    )


@contextlib.contextmanager
def running(config: Config, log_folder: Path) -> Iterator[Hybrid]:
    """Workers up, before the first weight sync. Needs a connected Ray with enough slots."""
    with hybrid_engine(config, PhaseClock(), log_folder) as hybrid:
        yield hybrid


def sampled(
    hybrid: Hybrid, prompts: list[np.ndarray], *, greedy: bool = False, seconds: float = 60.0
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
        found |= {r.request_id: r for r in hybrid.rollout.poll(1.0)}
        assert time.monotonic() < deadline, f"{len(found)} of {len(prompts)} responses after {seconds} s"
    return [found[name] for name in wanted.request_ids()]


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
            verdict=verdict_of(float(number % 2)),
        )
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    assert all((s.policy_versions == version).all() for s in samples)
    return make_groups(samples)
