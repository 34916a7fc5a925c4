"""Code that the ranks of the tests of draft heads run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.training import OptimizerSection
from mrl.training.pass_options import PassOptions
from tests.mrl.training import scenarios
from tests.tiny_models import random_batch


def train_and_export(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str, changes: dict[str, Any]
) -> list[dict[str, float]]:
    """Update twice, and export before, between and after; return the updates' metrics."""
    at = scenarios.worker(rank, world, port, folder, layout, drafts="trained", **changes)
    metrics = []
    for step in range(3):
        scenarios.export(at, Path(out, str(step)))
        metrics += scenarios.train(at, 1) if step < 2 else []
    return metrics


def gradients(rank: int, world: int, port: int, folder: str, drafts: str) -> dict[str, torch.Tensor]:
    """Return the gradients of one accumulated update, and the weights after it, by Megatron's names."""
    clips = OptimizerSection(lr=1e-3, clip_grad=0.05)
    at = scenarios.worker(rank, world, port, folder, {}, drafts=drafts, optimizer=clips)
    batch = random_batch(10, seed=1)
    count = {"num_tokens": int(batch.loss_mask.sum())}
    at.accumulate(batch, cross_entropy, count, PassOptions(temperature=scenarios.TEMPERATURE))
    (model,) = at.policy.chunks.models
    parameters: dict[str, Any] = dict(model.named_parameters())
    values = {f"gradient of {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}
    at.step()
    return values | {name: parameter.detach().clone() for name, parameter in parameters.items()}


def save_and_resume(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], path: str, saves: bool
) -> list[dict[str, float]]:
    """Save after an update, or resume from there; return the metrics of the update after it."""
    at = scenarios.worker(rank, world, port, folder, layout, drafts="trained")
    if saves:
        scenarios.train(at, 1)
        at.save_checkpoint(path, {})
    else:
        at.load_checkpoint(path)
    return scenarios.train(at, 1)
