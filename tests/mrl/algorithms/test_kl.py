"""KL estimators against golden numbers; the clamp and its count; gradients."""

import math

import pytest
import torch

from mrl.algorithms import kl
from mrl.algorithms.kl import KINDS, estimate_kl
from mrl.config.sections.algorithm import KlSection


@pytest.mark.parametrize(
    ("kind", "clamp", "variant"),
    [
        ("k1", None, "k1"),
        ("abs", None, "abs"),
        ("k2", None, "k2"),
        ("k3", None, "k3_unclamped"),
        ("k3", 10.0, "k3_clamped(-10,10)"),
        ("k1", 10.0, "openrlhf_k1_clamped"),
        ("k2", 10.0, "openrlhf_k2_clamped"),
    ],
)
def test_golden(golden, kind, clamp, variant, monkeypatch) -> None:
    monkeypatch.setattr(kl, "CLAMP", clamp or math.inf)
    case = golden("C01")
    logprobs, reference = case.tensor(case.inputs["logp"]), case.tensor(case.inputs["ref_logp"])
    values, clamped = estimate_kl(kind, logprobs - reference)
    case.check(values, case.expected[variant])
    assert clamped.tolist() == [False, False, False, clamp is not None]


def test_the_unbiased_form_multiplies_by_the_ratio(golden) -> None:
    case = golden("C04")
    logprobs, old = case.tensor(case.inputs["logp"]), case.tensor(case.inputs["old_logp"])
    k3, _ = estimate_kl("k3", logprobs - case.tensor(case.inputs["ref_logp"]))
    case.check(k3, case.expected["k3"])
    case.check((logprobs - old).exp() * k3, case.expected["ratio*k3"])


@pytest.mark.parametrize("clamp", [None, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_finite_differences(kind, clamp, monkeypatch) -> None:
    monkeypatch.setattr(kl, "CLAMP", clamp or math.inf)
    start = torch.tensor([-1.0, -0.3, -2.0, -4.0], dtype=torch.float64)
    reference = torch.tensor([-1.1, -0.5, -1.5, -3.9], dtype=torch.float64)
    variable = start.clone().requires_grad_()
    estimate_kl(kind, variable - reference)[0].sum().backward()
    for position in range(4):
        bump = torch.zeros_like(start)
        bump[position] = 1e-6
        high, low = (estimate_kl(kind, start + b - reference)[0].sum() for b in (bump, -bump))
        assert float(variable.grad[position]) == pytest.approx(float(high - low) / 2e-6, abs=1e-7)


def test_k3_of_an_extreme_token_has_a_finite_gradient() -> None:
    variable = torch.tensor([-500.0]).requires_grad_()
    value, _ = estimate_kl("k3", variable - torch.tensor([-1.0]))
    value.sum().backward()
    assert value.tolist() == [10.0]
    assert variable.grad.tolist() == [0.0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"unknown KL kind 'k4': .*known: k1, abs, k2, k3"):
        KlSection.model_validate({"location": "reward", "coefficient": 1.0, "kind": "k4"})
