"""Divergences over a teacher's likeliest tokens and one bucket for all others, against plain autograd on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.training.divergence import Vocabulary, divergence
from mrl.training.top_tokens import top_divergence, top_tokens
from tests.mrl.training.distillations import divergence_on_ranks
from tests.mrl.training.whole_logits import KINDS, SIZES, check, expected, inputs
from tests.ranks import run_ranks
from tests.support.largest_tensor import Largest

VOCAB, K = SIZES["vocab"], 6


def ours(kind: Any, share: float, k: int, *, padding: int, chunk: int) -> tuple[Tensor, ...]:
    hidden, weight, taught, head, scale = inputs(padding)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    vocabulary = Vocabulary(VOCAB, 0.6, chunk)
    said = top_tokens(taught, head, k, vocabulary)
    found = top_divergence(hidden, weight, *said, kind=kind, share=share, vocabulary=vocabulary)
    return found.detach(), *torch.autograd.grad((found * scale).sum(), (hidden, weight))


@pytest.mark.parametrize(("padding", "chunk"), [(0, 1), (5, 7), (0, 100)])
@pytest.mark.parametrize(("kind", "share"), KINDS)
def test_values_and_gradients(kind: str, share: float, padding: int, chunk: int) -> None:
    wanted = expected(kind, share, temperature=0.6, padding=padding, top_k=K)
    check(ours(kind, share, K, padding=padding, chunk=chunk), wanted)


@pytest.mark.parametrize(("kind", "share"), KINDS)
def test_all_tokens_are_the_whole_vocabulary(kind: str, share: float) -> None:
    """The bucket is then empty, also where rows of padding follow."""
    found = ours(kind, share, VOCAB, padding=5, chunk=7)
    check(found, expected(kind, share, temperature=0.6, padding=5))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_a_bucket_hides_some_of_the_divergence_and_adds_none(kind: Any) -> None:
    hidden, weight, taught, head, _ = inputs(0)
    vocabulary = Vocabulary(VOCAB, 1.0, 9)
    exact = divergence(hidden, weight, taught, head, kind=kind, share=0.5, vocabulary=vocabulary)
    below = exact + 1e-12
    for k in (20, 6, 1):
        said = top_tokens(taught, head, k, vocabulary)
        found = top_divergence(hidden, weight, *said, kind=kind, share=0.5, vocabulary=vocabulary)
        assert bool((found >= 0).all()) and bool((found <= below).all()), k
        below = found + 1e-12
    assert float((exact - found).mean()) > 0.1


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_a_bucket_too_small_for_a_number_of_its_own_is_finite(kind: Any) -> None:
    """The policy is sure of one of the teacher's tokens: exp() of what it gives all others is 0 in float32."""
    hidden = torch.full((1, 1), 300.0, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-0.1], [0.0]], requires_grad=True)
    ids, taught = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.6, 0.3, 0.1]]).log()
    vocabulary = Vocabulary(4, 1.0, 4)
    found = top_divergence(hidden, weight, ids, taught, kind=kind, share=0.5, vocabulary=vocabulary)
    grads = torch.autograd.grad(found.sum(), (hidden, weight))
    known = {"reverse": -torch.tensor(0.6).log(), "forward": 0.4 * 300.0 - 0.8979457}.get(kind)
    assert known is None or found.item() == pytest.approx(float(known), rel=1e-5)
    assert bool(torch.isfinite(found).all()) and all(bool(torch.isfinite(grad).all()) for grad in grads)


@pytest.mark.integration
def test_two_ranks_share_the_vocabulary() -> None:
    """31 tokens on two times 17 rows: the second rank has padding, and each some of the likeliest tokens."""
    padding = 3
    results = run_ranks(divergence_on_ranks, 2, inputs(padding), KINDS, VOCAB, K)
    for number, (kind, share) in enumerate(KINDS):
        values, by_hidden, by_weight = zip(*(result[number] for result in results), strict=True)
        assert torch.equal(values[0], values[1])
        wanted = expected(kind, share, temperature=0.6, padding=padding, top_k=K)
        check((values[0], sum(by_hidden), torch.cat(by_weight)), wanted)


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    vocabulary = Vocabulary(1000, 1.0, 16)
    with Largest() as seen:
        said = top_tokens(torch.randn(300, 6), torch.randn(1000, 6), 8, vocabulary)
        top_divergence(hidden, weight, *said, kind="jsd", share=0.5, vocabulary=vocabulary).sum().backward()
    assert seen.elements == 16 * 1000
