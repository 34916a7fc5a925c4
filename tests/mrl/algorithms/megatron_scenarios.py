"""Code that ranks run to drive objectives through the Megatron worker."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrl.algorithms.losses import PerToken, Tokens, reinforce
from mrl.algorithms.objective import Objective, cross_entropy
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.loops.mismatch import measure_mismatch
from mrl.samples import TrainBatch
from mrl.training.pass_options import PassOptions
from mrl.training.worker import MegatronWorker
from tests.mrl.training.scenarios import TEMPERATURE, digest_parameters, shard_of, worker

EXTRAS: dict[str, Any] = {
    "kl": {"location": "loss", "kind": "k3", "coefficient": 0.1},
    "entropy": {"coefficient": 0.01},
    "correction": {"kind": "truncated", "high": 1.1},
}


def pulled(tokens: Tokens, *, tau: float) -> PerToken:
    """A user's loss, found by its path on every rank: REINFORCE that pulls sequences to the old policy."""
    plain, log_ratio = reinforce(tokens), tokens.logprobs - tokens.old_logprobs
    pull = tau * tokens.sequence_log_ratio() * log_ratio
    return dataclasses.replace(plain, loss=plain.loss + pull)


WITHOUT_A_PASS: list[dict[str, Any]] = [
    {},
    {"loss": {"name": "gspo"}},
    {"correction": {"kind": "truncated", "high": 1.1}},
    {"correction": {"kind": "icepop", "low": 0.8, "high": 1.2}},
    {"kl": {"location": "loss", "kind": "k3", "coefficient": 0.5, "unbiased": True}},
    {"old_logprobs": "rollout"},
]
"""One update per step, so that nothing needs old log-probs before it."""


def update_with_each(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    batch: TrainBatch,
    configs: list[dict[str, Any]],
    microbatch_tokens: int,
    recompute: str,
) -> dict[str, Any]:
    """Return each configuration's metrics at lr 0, differences without a pass, and whether lr 1e-3 moves."""
    at = worker(rank, world, port, folder, layout, microbatch_tokens=microbatch_tokens, recompute=recompute)
    _, part = shard_of(batch, at)
    fresh = batch.loss_mask & (batch.arrays["age"] == 0)
    denominators = {
        "num_tokens": float(batch.loss_mask.sum()),
        "num_fresh_tokens": float(fresh.sum()),
        "num_sequences": float(batch.num_samples),
    }
    metrics = []
    for tree in configs:
        objective = Objective(AlgorithmSection.model_validate(tree))
        metrics.append(at.update(part, objective, denominators, PassOptions(temperature=TEMPERATURE), lr=0.0))
    before = digest_parameters(at.policy)
    differences = [_without_a_pass(at, part, tree, denominators) for tree in WITHOUT_A_PASS]
    assert before == digest_parameters(at.policy)
    moved = at.update(part, objective, denominators, PassOptions(temperature=TEMPERATURE), lr=1e-3)
    assert np.isfinite(moved["grad_norm"])
    return {"metrics": metrics, "moved": before != digest_parameters(at.policy), "differences": differences}


def _without_a_pass(
    at: MegatronWorker, shard: TrainBatch, tree: dict[str, Any], denominators: dict[str, float]
) -> dict[str, float]:
    """Return the largest differences between accumulate() with and without a pass for old log-probs.

    Gradients are relative to their largest element. "margins_at", the smallest margin, must not be 0 or
    infinity; a data-parallel rank without tokens has neither this nor "mismatch_at".
    """
    objective = Objective(AlgorithmSection.model_validate(tree))
    without = {name: array for name, array in shard.arrays.items() if name != "old_logprobs"}
    shard, served = dataclasses.replace(shard, arrays=without), np.ones(shard.num_tokens, np.bool_)
    old = _of_all_ranks(at, at.forward(shard, PassOptions(temperature=TEMPERATURE, with_router_margins=True)))
    results = []
    for batch in (shard.with_arrays(old_logprobs=old["logprobs"]), shard):
        metrics, arrays = at.accumulate(
            batch, objective, denominators, PassOptions(temperature=TEMPERATURE, with_router_margins=True)
        )
        gradient = torch.cat([buffer.grad_data.flatten() for buffer in at.policy.memory.buffers])
        results.append((metrics, gradient, arrays))
    (before, expected, _), (metrics, gradient, arrays) = results
    assert metrics.keys() == before.keys()
    direct = _of_all_ranks(at, arrays)
    measured = [
        measure_mismatch(shard, a["logprobs"], a["router_margin"], served=served, margin=1e-4)
        for a in (old, direct)
    ]
    mask, margins = shard.loss_mask, old["router_margin"][shard.loss_mask]
    differences = {
        "metrics": max(abs(metrics[name] - before[name]) for name in before),
        "gradient": float((gradient - expected).abs().max() / expected.abs().max()),
        "logprobs": float(np.abs(direct["logprobs"] - old["logprobs"])[mask].max(initial=0.0)),
        "untrained": float(np.abs(direct["logprobs"][~mask]).max(initial=0.0)),
        "margins": float(np.abs(direct["router_margin"][mask] - margins).max(initial=0.0)),
        "mismatch": max(abs(measured[0][name] - measured[1][name]) for name in measured[0]),
    }
    if len(margins):
        differences["margins_at"] = float(margins.min())
        differences["mismatch_at"] = measured[0]["policy/rollout_logprob_diff_max"]
    return differences


KL: dict[str, Any] = {"kl": {"location": "loss", "kind": "k3", "coefficient": 0.5, "unbiased": True}}


def reference_beside(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    batch: TrainBatch,
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Run the reference in a separate pass and within the policy's; return the results of both."""
    at = worker(rank, world, port, folder, layout, microbatch_tokens=40, **changes)
    _, shard = shard_of(batch, at)
    at.snapshot_reference()
    count = {"num_tokens": float(batch.loss_mask.sum()), "num_sequences": float(batch.num_samples)}
    at.update(shard, cross_entropy, count, PassOptions(temperature=TEMPERATURE), lr=1e-2)
    digest = digest_parameters(at.policy)
    separate = at.forward(shard, PassOptions(role="reference", temperature=TEMPERATURE))
    plain = at.forward(shard, PassOptions(temperature=TEMPERATURE))
    beside = at.forward(shard, PassOptions(temperature=TEMPERATURE, with_reference=True))
    objective, gradients, results = Objective(AlgorithmSection.model_validate(KL)), [], []
    known = shard.with_arrays(ref_logprobs=_of_all_ranks(at, separate)["logprobs"])
    for given, wanted in ((known, False), (shard, True)):
        results.append(
            at.accumulate(
                given, objective, count, PassOptions(temperature=TEMPERATURE, with_reference=wanted)
            )
        )
        gradients.append(torch.cat([b.grad_data.flatten() for b in at.policy.memory.buffers]).numpy())
    return {
        "forward": (separate, plain, beside),
        "metrics": [metrics for metrics, _ in results],
        "gradients": gradients,
        "arrays": results[1][1],
        "same": digest == digest_parameters(at.policy),
    }


def undrained(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], batch: TrainBatch, sign: str
) -> int:
    """Keep the last stage in the reference until the first starts the policy; count microbatches of both."""
    at = worker(rank, world, port, folder, layout, microbatch_tokens=40)
    at.snapshot_reference()
    begun: list[int] = []
    at.policy.chunks.models[0].register_forward_pre_hook(lambda *_: begun.append(at.place.pp))
    at.forward(batch, PassOptions(temperature=TEMPERATURE))
    count, swap = len(begun), at._frozen["reference"]

    @contextlib.contextmanager
    def stays(action: str) -> Iterator[None]:
        with swap(action):
            yield
            if at.place.pp == layout["pp"] - 1:
                _wait_for(Path(sign))

    def first(*_: Any) -> None:
        if at.place.pp == 0 and len(begun) == 2 * count + 1:
            Path(sign).touch()

    at.policy.chunks.models[0].register_forward_pre_hook(first)
    at._frozen["reference"] = stays
    at.forward(batch, PassOptions(temperature=TEMPERATURE, with_reference=True))
    return len(begun) - count


def _wait_for(path: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not appear")
        time.sleep(0.01)


def _of_all_ranks(at: MegatronWorker, arrays: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Return this data-parallel shard's arrays on every rank, as the driver has them."""
    everyone: list[Any] = [None] * at.layout.world_size
    dist.all_gather_object(everyone, (at.place.dp, arrays))
    return next(gathered for dp, gathered in everyone if dp == at.place.dp and gathered is not None)
