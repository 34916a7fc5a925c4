"""What the ranks of test_distillation do. Functions of a module, so that spawned ranks can find them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.distillation_terms import TEACHER
from mrl.algorithms.objective import Objective
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.distillation import DistillationSection
from mrl.loops.learn import denominators
from mrl.training.divergence import Vocabulary, divergence
from mrl.training.pass_options import PassOptions
from tests.mrl.training.scenarios import TEMPERATURE, digest_parameters, shard_of, train, worker
from tests.tiny_models import random_batch


def teachers_beside_a_policy(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], teachers: list[str]
) -> dict[str, Any]:
    """What each teacher says of this rank's shard while the policy trains; the policy is unharmed."""
    at = worker(rank, world, port, folder, layout)
    for path in teachers:
        at.add_teacher(path)
    train(at, 1)
    digest = digest_parameters(at.policy)
    mine, shard = shard_of(random_batch(10, seed=1), at)
    said = [
        at.forward(shard, PassOptions(role="teacher", teacher=path, temperature=TEMPERATURE))
        for path in teachers
    ]
    one = at.forward(
        shard.select(np.arange(min(1, len(mine)))), PassOptions(role="teacher", teacher=teachers[0])
    )
    refused = ""
    try:
        at.forward(shard, PassOptions(role="teacher", teacher="nobody"))
    except ValueError as error:
        refused = str(error)
    same = digest == digest_parameters(at.policy)
    return {"mine": mine, "said": said, "one": one, "same": same, "refused": refused}


def divergence_on_ranks(
    rank: int,
    world: int,
    port: int,
    inputs: tuple[Tensor, ...],
    kinds: list[tuple[Any, float]],
    vocab: int,
) -> list[tuple[Tensor, ...]]:
    """(divergences, this rank's part of the gradient by hidden, the gradient by its rows of the weight) of each kind."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = []
    for kind, share in kinds:
        hidden, weight, taught, head, scale = inputs
        hidden = hidden.clone().requires_grad_(True)
        own = weight.chunk(world)[rank].clone().requires_grad_(True)
        theirs, among = head.chunk(world)[rank], Vocabulary(vocab, 0.6, 5, dist.group.WORLD, rank)
        values = divergence(hidden, own, taught, theirs, kind=kind, share=share, vocabulary=among)
        found.append((values.detach(), *torch.autograd.grad((values * scale).sum(), (hidden, own))))
    dist.destroy_process_group()
    return found


def exact_step(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], section: DistillationSection
) -> dict[str, float]:
    """Metrics of one update by teachers alone; of each three samples, one is the first's, one the second's, one nobody's."""
    at = worker(rank, world, port, folder, layout)
    for path in section.folders:
        at.add_teacher(path)
    batch = random_batch(10, seed=1)
    batch = batch.with_arrays(advantages=np.zeros(batch.num_tokens, np.float32))
    batch = dataclasses.replace(batch, samples={TEACHER: np.arange(10) % 3 - 1})
    config = AlgorithmSection(aggregation={"mode": "token_mean"}, distillation=section)  # type: ignore[arg-type]
    _, shard = shard_of(batch, at)
    return at.update(
        shard,
        Objective(config),
        denominators(batch),
        PassOptions(temperature=TEMPERATURE),
        distillation=section,
    )
