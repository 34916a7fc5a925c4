"""Chunked divergences over the whole vocabulary against plain autograd on whole logits in float64, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.training.divergence import divergence
from tests.mrl.training.distillations import divergence_on_ranks
from tests.ranks import run_ranks
from tests.support.largest_tensor import Largest

SIZES = {"tokens": 23, "hidden": 8, "taught_hidden": 12, "vocab": 31}
KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


def inputs(padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, the teacher's two, and what each token's divergence counts; outputs spread over several nats."""
    generator = torch.Generator().manual_seed(0)
    tokens, rows = SIZES["tokens"], SIZES["vocab"] + padding

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own = made(tokens, SIZES["hidden"]), made(rows, SIZES["hidden"])
    return *own, made(tokens, SIZES["taught_hidden"]), made(rows, SIZES["taught_hidden"]), made(tokens)


def oracle(kind: str, share: float, temperature: float, padding: int) -> tuple[Tensor, ...]:
    """(divergences, gradients by hidden and weight) with all logits at once."""
    hidden, weight, taught, head, scale = inputs(padding)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    vocab = SIZES["vocab"]
    log_p, log_q = (
        (states @ rows[:vocab].t() / temperature).log_softmax(-1)
        for states, rows in ((hidden, weight), (taught, head))
    )
    log_m = (share * log_q.exp() + (1 - share) * log_p.exp()).log()
    found = {
        "reverse": (log_p.exp() * (log_p - log_q)).sum(-1),
        "forward": (log_q.exp() * (log_q - log_p)).sum(-1),
        "jsd": share * (log_q.exp() * (log_q - log_m)).sum(-1)
        + (1 - share) * (log_p.exp() * (log_p - log_m)).sum(-1),
    }[kind]
    return found.detach(), *torch.autograd.grad((found * scale).sum(), (hidden, weight))


def check(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 20, 300])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(("kind", "share"), KINDS)
def test_values_and_gradients(kind: Any, share: float, padding: int, chunk: int) -> None:
    hidden, weight, taught, head, scale = inputs(padding)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    found = divergence(
        hidden, weight, taught, head, kind=kind, share=share, vocab_size=SIZES["vocab"], temperature=0.6, chunk_tokens=chunk
    )  # fmt: skip
    grads = torch.autograd.grad((found * scale).sum(), (hidden, weight))
    check((found.detach(), *grads), oracle(kind, share, 0.6, padding))


@pytest.mark.integration
def test_two_ranks_share_the_vocabulary() -> None:
    """31 tokens on two times 17 rows: the second rank has padding."""
    padding = 3
    results = run_ranks(divergence_on_ranks, 2, inputs(padding), KINDS, SIZES["vocab"])
    for number, (kind, share) in enumerate(KINDS):
        values, by_hidden, by_weight = zip(*(result[number] for result in results), strict=True)
        assert torch.equal(values[0], values[1])
        check((values[0], sum(by_hidden), torch.cat(by_weight)), oracle(kind, share, 0.6, padding))


def test_of_itself_it_is_nothing() -> None:
    hidden, weight, *_ = inputs(0)
    for kind in ("reverse", "forward", "jsd"):
        found = divergence(
            hidden, weight, hidden, weight, kind=kind, share=0.5, vocab_size=31, temperature=1.0, chunk_tokens=9
        )  # fmt: skip
        assert float(found.abs().max()) < 1e-14


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Largest() as seen:
        found = divergence(
            hidden, weight, torch.randn(300, 6), torch.randn(1000, 6), kind="jsd", share=0.5, vocab_size=1000,
            temperature=1.0, chunk_tokens=48,
        )  # fmt: skip
        found.sum().backward()
    assert seen.elements == 16 * 1000
