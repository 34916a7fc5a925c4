"""What the ranks do that drive objectives through the Megatron worker. Functions of a module, for spawned ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrl.algorithms.objective import Objective
from mrl.config.algorithm import AlgorithmSection
from mrl.samples import TrainBatch
from tests.mrl.training.scenarios import TEMPERATURE, digest_parameters, shard_of, worker

EXTRAS: dict[str, Any] = {
    "kl": {"place": "loss", "kind": "k3", "coefficient": 0.1},
    "entropy": {"coefficient": 0.01},
    "correction": {"kind": "truncated", "high": 1.1},
}


def update_with_each(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    batch: TrainBatch,
    configs: list[dict[str, Any]],
    microbatch_tokens: int,
) -> dict[str, Any]:
    """Metrics of one update per configuration from the same parameters (lr 0), then one that moves them."""
    at = worker(rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens)
    _, shard = shard_of(batch, at)
    denominators = {"num_tokens": float(batch.loss_mask.sum()), "num_sequences": float(batch.num_samples)}
    metrics = []
    for tree in configs:
        objective = Objective(AlgorithmSection.model_validate(tree))
        metrics.append(at.update(shard, objective, denominators, temperature=TEMPERATURE, lr=0.0))
    before = digest_parameters(at)
    moved = at.update(shard, objective, denominators, temperature=TEMPERATURE, lr=1e-3)
    assert np.isfinite(moved["grad_norm"])
    return {"metrics": metrics, "moved": before != digest_parameters(at)}
