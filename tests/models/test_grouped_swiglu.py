"""Grouped products with experts without a token, and on ranks without any."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as functional

from mrl.models.kernels import experts
from mrl.models.kernels.experts import grouped_swiglu


def garbage_for_empty_groups(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """A grouped product whose backward leaves NaN where a group is empty, as CUDA's does on some devices."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch._grouped_mm(x, weight, offs=offs)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            bounds = [0, *offs.tolist()]
            weights = torch.full_like(weight, float("nan"))
            inputs = torch.empty_like(x)
            for group, (first, last) in enumerate(itertools.pairwise(bounds)):
                if first < last:
                    weights[group] = x[first:last].t() @ grad[first:last]
                    inputs[first:last] = grad[first:last] @ weight[group].t()
            return inputs, weights

    return Product.apply(x, weight)


@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [0, 0, 0, 2]])
def test_gradients_of_experts_without_a_token_are_zeros_whatever_the_kernel_leaves(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "grouped_mm", garbage_for_empty_groups)
    assert experts.functional.grouped_mm is garbage_for_empty_groups
    weight1, weight2 = (torch.randn(4, *shape, requires_grad=True) for shape in ((16, 8), (8, 8)))
    tokens = sum(counts)
    out = grouped_swiglu(torch.randn(tokens, 8), weight1, weight2, torch.tensor(counts), torch.rand(tokens))
    out.square().sum().backward()
    for weight in (weight1, weight2):
        assert weight.grad is not None
        for expert, count in enumerate(counts):
            assert bool(weight.grad[expert].any()) == (count > 0)
            assert weight.grad[expert].isfinite().all()


def test_a_rank_without_a_token_calls_no_grouped_product_and_has_gradients_of_zeros(monkeypatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a grouped product of nothing")

    monkeypatch.setattr(functional, "grouped_mm", refused)
    hidden, probs = torch.empty(0, 8, requires_grad=True), torch.empty(0, requires_grad=True)
    weight1, weight2 = (torch.randn(4, *shape, requires_grad=True) for shape in ((16, 8), (8, 8)))
    out = grouped_swiglu(hidden, weight1, weight2, torch.zeros(4, dtype=torch.int64), probs)
    assert out.shape == (0, 8)
    out.sum().backward()
    for parameter in (weight1, weight2, hidden, probs):
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()
