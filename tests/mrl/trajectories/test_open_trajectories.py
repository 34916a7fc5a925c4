"""Ten thousand open trajectories cost the driver little besides their tokens, each as much as the others."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import numpy as np

from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.request import Completion, GenerationRequest, Sampling
from mrl.samples import Prompt
from mrl.trajectories.group import RolloutRunner

SIZE = 16
SAMPLING = Sampling(SIZE, temperature=1.0, max_tokens=2000, seed=0)


class Silent:
    """An engine's client that never answers."""

    async def submit(self, request: GenerationRequest) -> Completion:
        return await asyncio.get_running_loop().create_future()


async def bytes_each(count: int) -> float:
    pool, nobody = EnginePool(["engine 0"], secret=b"", run_seed=0), None
    client: Any = Silent()
    pool._clients[0] = client
    pool._router.add(0)
    pool._serves.set()
    rollouts = RolloutRunner(pool, nobody, run_seed=0)  # type: ignore[arg-type]
    prompts = [Prompt(n, np.zeros(200, np.int32), "", None) for n in range(count // SIZE)]
    tracemalloc.start()
    groups = [rollouts.start(prompt, SAMPLING) for prompt in prompts]
    for _ in range(8):
        await asyncio.sleep(0)
    assert len(pool._open) == count // SIZE * SIZE, "not all wait for an engine"
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for group in groups:
        group.task.cancel()
    await asyncio.gather(*(group.task for group in groups), return_exceptions=True)
    return taken / count


def test_memory_is_linear_and_below_four_kibibytes_a_trajectory() -> None:
    few, many = (asyncio.run(bytes_each(count)) for count in (2_500, 10_000))
    assert many < 4096 and 0.8 < many / few < 1.25
