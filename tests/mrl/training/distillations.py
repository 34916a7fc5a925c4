"""Code that the ranks of test_distillation run, in a module so that spawned ranks can import it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.objective import Objective
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.distillation import TEACHER, DistillationSection
from mrl.config.sections.lora import LoraSection
from mrl.loops.learn import denominators
from mrl.training.divergence import Vocabulary, divergence
from mrl.training.pass_options import PassOptions
from tests.mrl.training.scenarios import TEMPERATURE, shard_of, worker
from tests.tiny_models import random_batch


def divergence_on_ranks(
    rank: int, world: int, port: int, inputs: tuple[Tensor, ...], kinds: list[tuple[Any, float]], vocab: int
) -> list[tuple[Tensor, ...]]:
    """Return divergences and this rank's gradients by hidden and by its weight rows, for each kind."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    results = []
    for kind, share in kinds:
        hidden, weight, taught, head, scale = inputs
        hidden = hidden.clone().requires_grad_(True)
        shard = weight.chunk(world)[rank].clone().requires_grad_(True)
        theirs, among = head.chunk(world)[rank], Vocabulary(vocab, 0.6, 5, dist.group.WORLD, rank)
        values = divergence(hidden, shard, taught, theirs, kind=kind, share=share, vocabulary=among)
        results.append((values.detach(), *torch.autograd.grad((values * scale).sum(), (hidden, shard))))
    dist.destroy_process_group()
    return results


def exact_step(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], section: DistillationSection
) -> dict[str, float]:
    """Return an update's metrics from teachers alone; samples take none, the first and the second in turn."""
    at = worker(rank, world, port, folder, layout)
    for path in section.folders:
        at.add_teacher(path)
    batch = random_batch(10, seed=1)
    batch = batch.with_arrays(advantages=np.zeros(batch.num_tokens, np.float32))
    batch = dataclasses.replace(batch, samples={TEACHER: np.arange(10) % 3 - 1})
    config = AlgorithmSection(aggregation={"mode": "token_mean"}, distillation=section)  # type: ignore
    _, shard = shard_of(batch, at)
    return at.update(
        shard,
        Objective(config),
        denominators(batch),
        PassOptions(temperature=TEMPERATURE),
        distillation=section,
    )


def starts_as_teachers(rank: int, world: int, port: int, start: str, copy: str) -> list[dict[str, float]]:
    """Return an update's metrics with the start of trained adapters as the teacher, then with its copy."""
    at = worker(
        rank, world, port, start, {}, lora=LoraSection(rank=4, targets=("attention", "routed_experts"))
    )
    batch = random_batch(10, seed=1)
    batch = dataclasses.replace(batch, samples={TEACHER: np.zeros(10, np.int64)})
    _, shard = shard_of(batch, at)
    results = []
    for teacher in (start, copy):
        at.add_teacher(teacher)
        section = DistillationSection(teachers={"any": teacher})
        config = AlgorithmSection(aggregation={"mode": "token_mean"}, distillation=section)  # type: ignore
        options = PassOptions(temperature=TEMPERATURE)
        if not results:  # the adapters begin at zero: rewards move them away from the start
            at.update(shard, Objective(config), denominators(batch), options, distillation=section)
        metrics, _ = at.accumulate(
            shard, Objective(config), denominators(batch), options, distillation=section
        )
        results.append(metrics)
    return results
