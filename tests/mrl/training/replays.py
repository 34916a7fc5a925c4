"""Code that ranks run to replay routes, in a module so that spawned ranks can import it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mrl.algorithms.objective import cross_entropy
from mrl.errors import MrlError
from mrl.routes import RouteRows, Routes
from mrl.samples import TrainBatch
from mrl.training.pass_options import PassOptions
from tests.mrl.training.scenarios import TEMPERATURE, shard_of, worker
from tests.tiny_models import random_batch

EXPERTS = 8


def random_routes(batch: TrainBatch, *, layers: int, topk: int) -> np.ndarray:
    """Return random distinct experts [N, layers, topk], which no router would choose."""
    rng = np.random.default_rng(3)
    return rng.random((batch.num_tokens, layers, EXPERTS)).argsort(axis=2)[..., :topk].astype(np.uint8)


def with_routes(batch: TrainBatch, block: np.ndarray) -> TrainBatch:
    """Return the batch with these routes, each sample's in two pieces."""
    bounds = zip(batch.cu_seqlens[:-1].tolist(), (batch.cu_seqlens[1:] - 1).tolist(), strict=True)
    routes = tuple(
        Routes((RouteRows(block, start, start + 1), RouteRows(block[start + 1 :], 0, stop - start - 1)))
        for start, stop in bounds
    )
    return dataclasses.replace(batch, routes=routes)


def record_and_replay(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], changes: dict[str, Any]
) -> dict[str, Any]:
    """Record a pass's routes; then run passes and an update with random ones."""
    at = worker(rank, world, port, folder, layout, replays=True, **changes)
    config = at.policy.chunks.config
    pattern = config.moe_layer_freq
    layers = sum(pattern) if isinstance(pattern, list) else config.num_layers
    batch = random_batch(10, seed=1)
    given = with_routes(batch, random_routes(batch, layers=layers, topk=config.moe_router_topk))
    mine, shard = shard_of(given, at)
    plain = dataclasses.replace(shard, routes=None)
    at.snapshot_reference()
    result = {
        "samples": mine,
        "recorded": at.forward(plain, PassOptions(temperature=TEMPERATURE, record_routes=True)),
        "given": at.forward(shard, PassOptions(temperature=TEMPERATURE)),
        "reference": at.forward(shard, PassOptions(role="reference", temperature=TEMPERATURE)),
    }
    count = {"num_tokens": int(batch.loss_mask.sum())}
    result["metrics"] = at.update(shard, cross_entropy, count, PassOptions(temperature=TEMPERATURE))
    result["after"] = at.forward(shard, PassOptions(temperature=TEMPERATURE))
    return result


def replay_own(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> dict[str, Any]:
    """Replay a rank's own choices in a pass and a gradient; collect the errors of incomplete routes."""
    at = worker(rank, world, port, folder, layout, replays=True)
    batch = random_batch(10, seed=1)
    first = at.forward(batch, PassOptions(record_routes=True))
    assert first is not None
    given = with_routes(batch, first["routes"])
    count = {"num_tokens": int(batch.loss_mask.sum())}
    again = at.forward(given)
    plain = at.accumulate(batch, cross_entropy, count)[0]
    replayed = at.accumulate(given, cross_entropy, count)[0]
    assert given.routes is not None
    short, missing = list(given.routes), list(given.routes)
    short[3] = dataclasses.replace(short[3], pieces=short[3].pieces[:1])
    missing[2] = dataclasses.replace(missing[2], missing=1)
    errors = []
    for routes in (short, missing):
        try:
            at.forward(dataclasses.replace(batch, routes=tuple(routes)))
        except MrlError as error:
            errors.append(str(error))
    return {"first": first, "again": again, "plain": plain, "own": replayed, "errors": errors}


def gaps(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    batch: TrainBatch,
    changes: dict[str, Any],
) -> dict[str, Any] | None:
    """Return |trainer - engine log-prob| with and without replay, signed too, and an update's metrics."""
    at = worker(rank, world, port, folder, layout, replays=True, max_length=256, **changes)
    taken, plain = at.forward(batch), at.forward(dataclasses.replace(batch, routes=None))
    count = {"num_tokens": int(batch.loss_mask.sum())}
    metrics = at.update(batch, cross_entropy, count)
    if taken is None or plain is None:
        return None
    engine = batch.arrays["rollout_logprobs"]
    signed = {
        name: (arrays["logprobs"] - engine)[batch.loss_mask]
        for name, arrays in (("taken", taken), ("own", plain))
    }
    return {name: np.abs(gap) for name, gap in signed.items()} | {"signed": signed, "metrics": metrics}
