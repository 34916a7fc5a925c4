"""Chunked log-probs and entropy against plain float64 autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.training.logprobs import Kept, logprobs_and_entropy
from tests.support.largest_tensor import Largest


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk: int, padding: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31 + padding, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (23,), generator=generator)
    scale = torch.randn(2, 23, generator=generator, dtype=torch.float64)

    log_p = (hidden @ weight[:31].t() / temperature).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    grads = torch.autograd.grad((expected[0] * scale[0] + expected[1] * scale[1]).sum(), (hidden, weight))

    values = logprobs_and_entropy(
        hidden, weight, targets, vocab_size=31, temperature=temperature, chunk_tokens=chunk
    )
    found_grads = torch.autograd.grad((values[0] * scale[0] + values[1] * scale[1]).sum(), (hidden, weight))
    for ours, theirs in zip((*values, *found_grads), (*expected, *grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_values_and_gradients_over_sampling_masks(chunk: int) -> None:
    """Rows without a mask are normalised over the whole vocabulary; other ranks have other columns."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(36, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    left = torch.rand(23, 31, generator=generator) < 0.4
    left[::5] = False
    targets = torch.randint(0, 31, (23,), generator=generator)
    left[torch.arange(23), targets] |= left.any(dim=1)
    scale = torch.randn(2, 23, generator=generator, dtype=torch.float64)

    logits = hidden @ weight[:31].t() / 0.6
    log_p = logits.masked_fill(left.any(dim=1)[:, None] & ~left, float("-inf")).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)
    grads = torch.autograd.grad((expected[0] * scale[0] + expected[1] * scale[1]).sum(), (hidden, weight))

    bounds = np.concatenate([[0], np.cumsum(left.sum(dim=1).numpy())])
    kept = Kept(bounds, left.nonzero()[:, 1].int())
    values = logprobs_and_entropy(
        hidden, weight, targets, vocab_size=31, temperature=0.6, chunk_tokens=chunk, kept=kept
    )
    ours = torch.autograd.grad((values[0] * scale[0] + values[1] * scale[1]).sum(), (hidden, weight))
    for mine, theirs in zip((*values, *ours), (*expected, *grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    logits = torch.zeros(23, 10)
    kept.apply(logits, slice(0, 23), 20)
    whole = left.any(dim=1)[:, None] & ~left
    assert torch.equal(logits == float("-inf"), whole[:, 20:30])


def test_without_a_gradient_through_the_entropy() -> None:
    hidden = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    targets = torch.arange(9) % 6
    logprobs, _ = logprobs_and_entropy(hidden, weight, targets, vocab_size=6, temperature=1.0, chunk_tokens=4)
    (ours,) = torch.autograd.grad(logprobs.sum(), hidden)
    log_p = (hidden @ weight.t()).log_softmax(-1)
    (theirs,) = torch.autograd.grad(log_p.gather(1, targets[:, None]).sum(), hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_two_chunks_of_logits_exist_at_most_and_nothing_is_larger() -> None:
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with Largest() as seen:
        logprobs, entropy = logprobs_and_entropy(
            hidden,
            weight,
            torch.zeros(512, dtype=torch.int64),
            vocab_size=1000,
            temperature=1.0,
            chunk_tokens=16,
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert (seen.elements, seen.alive) == (16 * 1000, 2)


def test_the_expected_gradient_over_masks_is_that_of_the_truncated_policys_reward() -> None:
    """All responses of two tokens that a policy with top_p 0.8 can draw, each with its probability."""
    vocab, dim, temperature = 7, 5, 0.9
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1 + vocab, dim, generator=generator, dtype=torch.float64) / 3
        weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        reward = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
        logits = hidden @ weight.t() / temperature
        order = logits.softmax(-1).sort(-1, descending=True)
        nucleus = order.values.cumsum(-1) - order.values < 0.8
        mask = torch.zeros_like(nucleus).scatter(-1, order.indices, nucleus)
        probs = logits.masked_fill(~mask, -torch.inf).softmax(-1)  # row 0: first token; row 1 + y: after y
        expected = (probs[0, :, None] * probs[1:] * reward).sum()
        (truth,) = torch.autograd.grad(expected, weight)
        assert truth.norm() > 0 and not mask.all()

        first, second = torch.nonzero(mask[0, :, None] & mask[1:], as_tuple=True)
        rows = torch.cat([torch.zeros_like(first), 1 + first])
        tokens = torch.cat([torch.nonzero(mask[row])[:, 0] for row in rows.tolist()]).int()
        bounds = np.concatenate([[0], np.cumsum(mask.sum(-1)[rows].numpy())])
        value = (probs[0, first] * probs[1 + first, second] * reward[first, second]).detach()
        gradients = []
        for kept in (Kept(bounds, tokens), None):
            logprobs, _ = logprobs_and_entropy(
                hidden[rows],
                weight,
                torch.cat([first, second]),
                vocab_size=vocab,
                temperature=temperature,
                chunk_tokens=4,
                kept=kept,
            )
            gradients.append(torch.autograd.grad((value * logprobs.view(2, -1).sum(0)).sum(), weight)[0])
        errors = [float((gradient - truth).norm() / truth.norm()) for gradient in gradients]
        assert errors[0] < 1e-12 and errors[1] > 1e-2, errors
