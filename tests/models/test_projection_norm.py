"""The norm over all heads on real ranks: values and gradients are those of the whole projection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mrl.models.megatron.projection_norm import ProjectionNorm
from tests.ranks import run_ranks

pytestmark = pytest.mark.integration

HEADS, WIDTH, TOKENS, EPS = 2, 8, 5, 1e-5


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(rank: int, world: int, port: int) -> dict[str, Any]:
    """Return a rank's normed heads, and gradients of a sum that differs from rank to rank."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(world)
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    norm = ProjectionNorm(heads=HEADS, config=config, hidden_size=WIDTH, eps=EPS)
    norm.weight.data = random(0, HEADS * WIDTH)
    count, first = max(1, HEADS // world), rank * HEADS // world
    x = random(1, TOKENS, 1, HEADS, WIDTH)[:, :, first : first + count].clone().requires_grad_()
    out = norm(x)
    (out * random(2 + rank, *out.shape)).sum().backward()
    dist.all_reduce(norm.weight.grad)  # as Megatron sums those of weights marked sequence_parallel
    return {"heads": (first, count), "out": out.detach(), "x": x.grad, "weight": norm.weight.grad}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_are_the_norm_of_the_whole_projection(world: int) -> None:
    """With four ranks each head is on two, whose gradients are summed as Megatron's gather of keys does."""
    x, weight = random(1, TOKENS, 1, HEADS, WIDTH).requires_grad_(), random(0, HEADS * WIDTH).requires_grad_()
    whole = torch.nn.functional.rms_norm(x.flatten(-2), (HEADS * WIDTH,), weight, EPS).view_as(x)
    parts, gradient, loss = run_ranks(normed, world), torch.zeros_like(x), torch.zeros(())
    for rank, part in enumerate(parts):
        first, count = part["heads"]
        heads = slice(first, first + count)
        torch.testing.assert_close(part["out"], whole[:, :, heads].detach())
        gradient[:, :, heads] += part["x"]
        loss = loss + (whole[:, :, heads] * random(2 + rank, *part["out"].shape)).sum()
    loss.backward()
    torch.testing.assert_close(gradient, x.grad)
    for part in parts:
        torch.testing.assert_close(part["weight"], weight.grad)
