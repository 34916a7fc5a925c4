"""What the ranks of test_distillation do. Functions of a module, so that spawned ranks can find them."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    said = [at.forward(shard, role="teacher", teacher=path, temperature=TEMPERATURE) for path in teachers]
    one = at.forward(shard.select(np.arange(min(1, len(mine)))), role="teacher", teacher=teachers[0])
    refused = ""
    try:
        at.forward(shard, role="teacher", teacher="nobody")
    except ValueError as error:
        refused = str(error)
    same = digest == digest_parameters(at.policy)
    return {"mine": mine, "said": said, "one": one, "same": same, "refused": refused}
