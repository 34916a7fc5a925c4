"""Chunked divergences over the vocabulary against plain float64 autograd, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrl.training.divergence import Vocabulary, divergence
from tests.mrl.training.distillations import divergence_on_ranks
from tests.mrl.training.whole_logits import KINDS, SIZES, check, expected, inputs
from tests.ranks import run_ranks
from tests.support.largest_tensor import Largest


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(("kind", "share"), KINDS)
def test_values_and_gradients(kind: Any, share: float, padding: int, chunk: int) -> None:
    hidden, weight, taught, head, scale = inputs(padding)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    values = divergence(
        hidden, weight, taught, head, kind=kind, share=share,
        vocabulary=Vocabulary(SIZES["vocab"], 0.6, chunk),
    )  # fmt: skip
    grads = torch.autograd.grad((values * scale).sum(), (hidden, weight))
    check((values.detach(), *grads), expected(kind, share, temperature=0.6, padding=padding))


@pytest.mark.integration
def test_two_ranks_share_the_vocabulary() -> None:
    """31 tokens on two times 17 rows: the second rank has padding."""
    padding = 3
    results = run_ranks(divergence_on_ranks, 2, inputs(padding), KINDS, SIZES["vocab"])
    for number, (kind, share) in enumerate(KINDS):
        values, by_hidden, by_weight = zip(*(result[number] for result in results), strict=True)
        assert torch.equal(values[0], values[1])
        wanted = expected(kind, share, temperature=0.6, padding=padding)
        check((values[0], sum(by_hidden), torch.cat(by_weight)), wanted)


def test_of_itself_it_is_nothing() -> None:
    hidden, weight, *_ = inputs(0)
    for kind in ("reverse", "forward", "jsd"):
        values = divergence(
            hidden, weight, hidden, weight, kind=kind, share=0.5, vocabulary=Vocabulary(31, 1.0, 3)
        )  # fmt: skip
        assert float(values.abs().max()) < 1e-14


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Largest() as seen:
        values = divergence(
            hidden, weight, torch.randn(300, 6), torch.randn(1000, 6), kind="jsd", share=0.5,
            vocabulary=Vocabulary(1000, 1.0, 16),
        )  # fmt: skip
        values.sum().backward()
    assert seen.elements == 16 * 1000
