"""Engines report each position's experts over pauses and preemptions; a trainer that takes them agrees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import Completion, GenerationRequest
from mrl.samples import TrainBatch
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.mrl.rollout import driving
from tests.mrl.training import replays
from tests.ranks import run_ranks
from tests.tiny_models import batch_of_tokens, write_model

pytestmark = pytest.mark.integration
MAX_TOKENS = 40


def asked(*, prompts: int, samples: int, length: int) -> list[GenerationRequest]:
    """Return requests, several per prompt; every two prompts share 128 tokens (cache blocks)."""
    rng = np.random.default_rng(0)
    made = rng.integers(2, 131, (prompts, length)).astype(np.int32)
    made[1::2, :128] = made[::2, :128]
    return [
        GenerationRequest(f"{i}.{n}", made[i], 1000 * i + n, MAX_TOKENS, ignore_stop=True)
        for i in range(prompts)
        for n in range(samples)
    ]


def answered(
    engine: RolloutEngine, requests: list[GenerationRequest], steps: int
) -> tuple[list[Completion], dict[str, int]]:
    """Return the completions and how often prompts were split, requests preempted and cache blocks shared."""
    core: Any = engine._engine.engine_core.engine_core
    seen = {"split": 0, "preempted": 0, "shared": 0}
    preemptions: dict[str, int] = {}
    ended: list[Completion] = []
    engine.submit(requests)
    while engine.has_work:
        for _ in range(steps):
            ended += engine.step()
            for request in core.scheduler.requests.values():
                preemptions[request.request_id] = request.num_preemptions
                seen["split"] += 0 < request.num_computed_tokens < request.num_prompt_tokens
            blocks = [core.scheduler.kv_cache_manager.get_blocks(name).blocks[0] for name in preemptions]
            seen["shared"] = max([seen["shared"], *(block.ref_cnt for table in blocks for block in table)])
        engine.pause()
        engine.resume()
    return driving.whole(requests, ended), seen | {"preempted": sum(preemptions.values())}


def batch_of(requests: list[GenerationRequest], responses: list[Completion]) -> TrainBatch:
    tokens = [
        np.concatenate([r.prompt_tokens, a.tokens]).tolist() for r, a in zip(requests, responses, strict=True)
    ]
    batch = batch_of_tokens(tokens)
    logprobs = [
        np.concatenate([np.zeros(len(r.prompt_tokens), np.float32), a.logprobs])
        for r, a in zip(requests, responses, strict=True)
    ]
    mask = np.concatenate(
        [np.arange(len(t)) >= len(r.prompt_tokens) for t, r in zip(tokens, requests, strict=True)]
    )
    batch = dataclasses.replace(batch, loss_mask=mask).with_arrays(rollout_logprobs=np.concatenate(logprobs))
    assert all(a.routes is not None and a.routes.missing == 0 for a in responses)
    return dataclasses.replace(batch, routes=tuple(a.routes for a in responses if a.routes is not None))


def engine(model: Path, **rollout: Any) -> EngineHost:
    usual = {"dtype": "float32", "enforce_eager": True, "kv_cache_bytes": 64 << 20}
    settings = usual | {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    return EngineHost(
        rollout=RolloutSection(**(settings | rollout)),
        model_path=str(model),
        max_length=256,
        seed=1,
        real_weights=True,
        routes=True,
    )


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_that_takes_the_engines_routes_agrees_at_every_token(tiny_model: Path, tp: int) -> None:
    """Prompts are split over passes and found in the prefix cache; requests are preempted and paused."""
    host = engine(tiny_model, tp=tp, kv_cache_bytes=1 << 20, engine_args={"block_size": 32})
    requests = asked(prompts=4, samples=3, length=140)
    responses, seen = host.call(answered, requests, 40)
    host.close()
    assert seen["split"] and seen["preempted"] and seen["shared"] > 1, seen
    assert any(len(r.segments) > 1 for r in responses)
    batch = batch_of(requests, responses)
    assert [len(r) for r in batch.routes or ()] == [140 + MAX_TOKENS - 1] * len(requests)
    (result,) = run_ranks(replays.gaps, 1, str(tiny_model), {}, batch, {"dtype": "float32"})
    print(
        {name: float(result[name].max()) for name in ("taken", "own")}, result["metrics"]["routing/agreement"]
    )
    assert result["taken"].max() < 1e-5
    assert result["metrics"]["routing/agreement"] > 0.999


@pytest.mark.slow
def test_in_bfloat16_the_distance_falls_at_least_to_a_third(tmp_path: Path) -> None:
    """Compare k3 KL of trainer and engine; no token is off by more than 0.05."""
    changes = {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4, "initializer_range": 0.05}
    model = write_model(tmp_path / "model", **ENGINE_SHAPE | {"hidden_size": 128}, **changes)
    host = engine(model, dtype="bfloat16", kv_cache_bytes=64 << 20, max_num_seqs=48)
    requests = asked(prompts=24, samples=2, length=16)
    responses, _ = host.call(answered, requests, 10_000)
    host.close()
    batch = batch_of(requests, responses)
    layout = {"tp": 2, "ep": 2}
    (result, *_) = run_ranks(replays.gaps, 2, str(model), layout, batch, {"dtype": "bfloat16"})
    k3 = {name: float((np.expm1(gap) - gap).mean()) for name, gap in result["signed"].items()}
    print(k3, {name: float(np.abs(gap).max()) for name, gap in result["signed"].items()}, result["metrics"])
    assert k3["taken"] < k3["own"] / 3
    assert result["taken"].max() < 0.05 < result["own"].max()
