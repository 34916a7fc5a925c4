"""Reference divergences of policy and teacher: plain float64 autograd on whole logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIZES = {"tokens": 23, "hidden": 8, "taught_hidden": 12, "vocab": 31}
KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


def inputs(padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, the teacher's two, and each token's weight; outputs spread over several nats."""
    generator = torch.Generator().manual_seed(0)
    tokens, rows = SIZES["tokens"], SIZES["vocab"] + padding

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = made(tokens, SIZES["hidden"]), made(rows, SIZES["hidden"])
    return *policy, made(tokens, SIZES["taught_hidden"]), made(rows, SIZES["taught_hidden"]), made(tokens)


def expected(kind: str, share: float, *, temperature: float, padding: int) -> tuple[Tensor, ...]:
    """Return divergences, and gradients by hidden and weight."""
    hidden, weight, taught, head, scale = inputs(padding)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    vocab = SIZES["vocab"]
    log_p, log_q = (
        (states @ rows[:vocab].t() / temperature).log_softmax(-1)
        for states, rows in ((hidden, weight), (taught, head))
    )
    log_m = (share * log_q.exp() + (1 - share) * log_p.exp()).log()
    divergences = {
        "reverse": (log_p.exp() * (log_p - log_q)).sum(-1),
        "forward": (log_q.exp() * (log_q - log_p)).sum(-1),
        "jsd": share * (log_q.exp() * (log_q - log_m)).sum(-1)
        + (1 - share) * (log_p.exp() * (log_p - log_m)).sum(-1),
    }[kind]
    return divergences.detach(), *torch.autograd.grad((divergences * scale).sum(), (hidden, weight))


def check(results: Any, wanted: Any) -> None:
    for ours, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
