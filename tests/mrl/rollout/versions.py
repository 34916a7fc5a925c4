"""Requests whose responses take several versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mrl.rollout.request import Completion, GenerationRequest
from mrl.rollout.seeds import sample_seed
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.conftest import SYNC
from tests.resharding.feeding import Feeder, read
from tests.tiny_models import batch_of_tokens, reference_logprobs, write_model


def asked(count: int, *, max_tokens: int = 24, length: int = 8, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, 131, (count, length)).astype(np.int32)
    return [
        GenerationRequest(f"{i}.0", prompt, sample_seed(5, i, 0), max_tokens, ignore_stop=True)
        for i, prompt in enumerate(prompts)
    ]


def folders_of(tiny_model: Path, folder: Path) -> list[Path]:
    return [tiny_model, *(write_model(folder / str(s), **ENGINE_SHAPE, seed=s) for s in (5, 6))]


def synced(engine: EngineHost, folders: list[Path]) -> None:
    """Send an engine the weights of these folders in order, each as its next version."""
    feeder = Feeder(engine.call(driving.addresses), SYNC)
    for folder in folders:
        version, weights = engine.call(driving.version), read(folder)
        session = feeder.session(weights, version, version + 1)
        feeding = feeder.send(session, weights)
        engine.call(driving.receive, session)
        assert not feeding.end().errors
    engine.call(driving.release)
    feeder.close()


def in_three_versions(
    serving: EngineHost, folders: list[Path]
) -> tuple[list[GenerationRequest], list[Completion], int]:
    """Return requests, ordered completions of three segments, and the first version (the first folder's)."""
    requests, first = asked(12), serving.call(driving.version)
    completions, parts = serving.call(driving.paused_after, requests, 8)
    assert not completions and {len(part.tokens) for part in parts} == {8}
    for number, steps in enumerate((8, 100, 0), 1):
        synced(serving, [folders[number % 3]])
        completions += serving.call(driving.steps, [], steps)
        serving.call(driving.pause)
    completions = driving.whole(requests, completions)
    assert {len(completion.segments) for completion in completions} == {3}
    return requests, completions, first


def gaps(
    requests: list[GenerationRequest], completions: list[Completion], folders: list[Path], first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-prob gaps from transformers in float32: for each token's version, and for the next one."""
    batch = batch_of_tokens(
        [[*q.prompt_tokens.tolist(), *r.tokens.tolist()] for q, r in zip(requests, completions, strict=True)]
    )
    by_version = np.stack([reference_logprobs(folder, batch)[0] for folder in folders])
    starts = batch.cu_seqlens[:-1] + [len(q.prompt_tokens) for q in requests]
    at = np.concatenate([s + np.arange(len(r.tokens)) for s, r in zip(starts, completions, strict=True)])
    versions = np.concatenate([r.policy_versions for r in completions]) - first
    logprobs = np.concatenate([r.logprobs for r in completions])
    right = abs(by_version[versions, at] - logprobs)
    shifted = abs(by_version[(versions + 1) % len(folders), at] - logprobs)
    return right, shifted
