"""Code that the ranks of the critic's tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.algorithms.objective import ValueObjective
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.critic import CriticOptimizerSection, CriticSection
from mrl.errors import MrlError
from mrl.samples import TrainBatch
from mrl.training.loaded_model import HEAD
from mrl.training.pass_options import PassOptions
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.mrl.training.scenarios import digest_parameters, shard_of, train, worker
from tests.tiny_models import COMMON, random_batch

SECTION = CriticSection(optimizer=CriticOptimizerSection(lr=1e-3, clip_grad=0.0))


def head_weight(numbers: int = 1) -> torch.Tensor:
    """Return a nonzero value head [numbers, D], so that gradients reach the backbone."""
    return torch.randn(numbers, COMMON["hidden_size"], generator=torch.Generator().manual_seed(5)) / 4


def batch_with_returns() -> TrainBatch:
    """Return ten uneven samples, some with one-token prompts, returns in [0, 1) and old values of 0."""
    batch = random_batch(10, seed=1)
    returns = np.random.default_rng(2).random(batch.num_tokens).astype(np.float32)
    return batch.with_arrays(returns=returns, values=np.zeros_like(returns))


def with_critic(*arguments: Any, head: torch.Tensor | None) -> MegatronWorker:
    at = worker(*arguments)
    at.add_critic(SECTION)
    if head is not None:
        set_head(critic_of(at), head)
    return at


def set_head(model: TrainedModel, head: torch.Tensor | None = None) -> None:
    """Set the model's value head, by default to head_weight()."""
    for chunk in model.chunks.models:
        for name, parameter in chunk.named_parameters():
            if name == HEAD:
                parameter.data.copy_(head_weight() if head is None else head)
    model.optimizer.take_parameters()


def critic_of(at: MegatronWorker) -> TrainedModel:
    assert at.critic is not None
    return at.critic


def named(at: MegatronWorker) -> dict[str, Any]:
    return {n: p for model in critic_of(at).chunks.models for n, p in model.named_parameters()}


def update(at: MegatronWorker, steps: int) -> list[dict[str, float]]:
    batch = batch_with_returns()
    _, shard = shard_of(batch, at)
    count = {"num_tokens": int(batch.loss_mask.sum()), "num_sequences": batch.num_samples}
    objective = ValueObjective(AlgorithmSection.model_validate({"value_clip": None}))
    return [at.update(shard, objective, count, PassOptions(role="critic")) for _ in range(steps)]


def values_and_updates(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> Any:
    """Compute values, update twice, compute them again; policy and critic must not touch each other."""
    at = with_critic(rank, world, port, folder, layout, head=head_weight())
    mine, shard = shard_of(batch_with_returns(), at)
    policy, before = digest_parameters(at.policy), at.forward(shard, PassOptions(role="critic"))
    first = update(at, 1)
    gradients = {name: p.main_grad.clone() for name, p in named(at).items()} if world == 1 else {}
    metrics = first + update(at, 1)
    after = at.forward(shard, PassOptions(role="critic"))
    alone = policy == digest_parameters(at.policy)
    train(at, 1)
    again = at.forward(shard, PassOptions(role="critic"))
    still = after is None or np.array_equal(after["values"], again["values"])  # type: ignore[index]
    return {
        "samples": mine,
        "before": before,
        "after": after,
        "metrics": metrics,
        "gradients": gradients,
        "alone": alone and still,
    }


def save_and_resume(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> dict[str, Any]:
    """Step policy and critic with a fresh head, save, step the critic; restore and repeat that step."""
    at = with_critic(rank, world, port, folder, layout, head=None)
    fresh = at.forward(shard_of(batch_with_returns(), at)[1], PassOptions(role="critic"))
    train(at, 1)
    update(at, 1)
    at.save_checkpoint(Path(out, "step-000001"), {"next_step": 2})
    first, digest = update(at, 1), digest_parameters(critic_of(at))
    extra = at.load_checkpoint(Path(out, "step-000001"))
    again = update(at, 1)
    same = digest == digest_parameters(critic_of(at))
    at.critic = None
    at.save_checkpoint(Path(out, "step-000002"), {})
    at.add_critic(SECTION)
    refused = ""
    try:
        at.load_checkpoint(Path(out, "step-000002"))
    except MrlError as error:
        refused = str(error)
    return {"fresh": fresh, "steps": (first, again), "same": same, "extra": extra, "refused": refused}
