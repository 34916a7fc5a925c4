"""Code that the ranks of the adapter tests run, in a module so that spawned ranks can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.lora import LoraSection
from mrl.config.sections.model import ModelSection
from mrl.training.pass_options import PassOptions
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.mrl.training.scenarios import TEMPERATURE, digest_parameters, export, shard_of, train, worker
from tests.tiny_models import random_batch


def life(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Run two updates, save and export, then two more updates; return policy and reference at each stage."""
    at = worker(rank, world, port, folder, layout, **changes)
    result: dict[str, Any] = {"loaded": digest_parameters(at.policy), "held": held(at)}
    result["samples"], shard = shard_of(random_batch(10, seed=1), at)
    at.snapshot_reference()
    result["before"] = at.forward(shard, PassOptions(temperature=TEMPERATURE))
    result["reference_before"] = at.forward(shard, PassOptions(role="reference", temperature=TEMPERATURE))
    result["metrics"] = train(at, 2)
    result["arrays"] = at.forward(shard, PassOptions(temperature=TEMPERATURE))
    result["digest"] = digest_parameters(at.policy)
    result["reference"] = at.forward(shard, PassOptions(role="reference", temperature=TEMPERATURE))
    result["swapped"] = digest_parameters(at.policy)
    at.save_checkpoint(Path(out, "step-000002"), {"position": 2})
    export(at, Path(out, "merged"))
    result["more"], result["end"] = train(at, 2), digest_parameters(at.policy)
    at.policy.memory.lease()
    try:
        at.forward(shard, PassOptions(role="reference"))
    except RuntimeError as error:
        result["leased"] = str(error)
    return result


def resumed(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], path: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Resume a fresh worker from the checkpoint and train two more steps."""
    at = worker(rank, world, port, folder, layout, **changes)
    extra = at.load_checkpoint(path)
    digest = digest_parameters(at.policy)
    return {"extra": extra, "digest": digest, "more": train(at, 2), "end": digest_parameters(at.policy)}


def held(at: MegatronWorker) -> dict[str, int]:
    """Return the bytes of this rank's weights, gradients and optimizer state (float32: moments only)."""
    at.policy.optimizer.prime()
    moments = [
        value
        for part in at.policy.optimizer.parts()
        for state in part.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    ]
    buffers = at.policy.memory.buffers
    return {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(value.nbytes for value in moments),
    }


def restricted_step(
    rank: int, world: int, port: int, folder: str, out: str, lora: LoraSection, dtype: str, recompute: str
) -> float:
    """Return the largest relative error of the gradients of A and B against those from the full model."""
    at = worker(rank, world, port, folder, {}, lora=lora, dtype=dtype, recompute=recompute)
    train(at, 2)
    export(at, Path(out, "merged"))
    training = at.training.model_copy(update={"lora": None})
    model = ModelSection(path=str(Path(out, "merged")), max_length=64)
    full = TrainedModel(model, training, layout=at.layout, place=at.place, device=at.device)
    full.load_hf(model.path)
    batch = random_batch(10, seed=2)
    count = {"num_tokens": int(batch.loss_mask.sum())}
    metrics = [m.accumulate(batch, cross_entropy, count, PassOptions())[0] for m in (at.policy, full)]
    assert metrics[0]["loss"] == metrics[1]["loss"], metrics
    return max(_differences(at.policy, full))


def _differences(adapted: TrainedModel, full: TrainedModel) -> list[float]:
    weights: Any = full.chunks.models[0].weights()
    differences = []
    for pair in adapted.chunks.models[0].pairs:
        slabs, grad = pair.adapter.num_pairs, weights[pair.adapter.parameter].main_grad
        parts = (grad, pair.a.detach().float(), pair.b.detach().float(), pair.a.main_grad, pair.b.main_grad)
        for dw, a, b, da, db in zip(*(part.chunk(slabs) for part in parts), strict=True):
            for ours, theirs in ((da, pair.scale * b.t() @ dw), (db, pair.scale * dw @ a.t())):
                assert theirs.abs().max() > 0 or not ours.abs().max()
                differences.append(float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-20)))
    return differences
