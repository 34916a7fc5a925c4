"""Policy losses: golden numbers per formula, and finite differences."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import losses
from mrl.algorithms.losses import LOSSES, PerToken, Tokens
from tests.mrl.algorithms.padded import FORMS, NAMES, SECTIONS, aggregate, policy_loss, tokens_of

OPTIONS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"dual_clip": 1.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.04},
    "cispo": {"clip_low": 0.1, "clip_high": 0.2},
    "dppo_tv": {"low": 0.05, "high": 0.05},
    "reinforce": {},
}
"""Bounds tight enough that the random batch crosses all of them."""


def tokens(case, *, advantages: str = "advantages") -> tuple[Tokens, Tensor]:
    mask, scores = case.tensor(case.inputs["mask"]).bool(), case.inputs.get("scores")
    checked = tokens_of(
        logprobs=case.tensor(case.inputs["logp"]),
        old_logprobs=case.tensor(case.inputs["old_logp"]),
        advantages=case.tensor(case.inputs[advantages]).expand(mask.shape),
        loss_mask=mask,
        scores=None if scores is None else case.tensor(scores),
    )
    return checked, mask


def formula(name: str, given: Tokens, **constants: Any) -> PerToken:
    """Compute a loss; its constants are not checked against the section's bounds."""
    return losses.loss_of(FORMS[name].model_construct(**constants))(given)


def per_token(name: str, case, *, advantages: str = "advantages", **constants: Any) -> Tensor:
    given, mask = tokens(case, advantages=advantages)
    return formula(name, given, **constants).loss.reshape(mask.shape)


@pytest.mark.parametrize(
    ("variant", "name", "options"),
    [
        ("no dual clip", "ppo_clip", {}),
        ("dual_clip=3 (OpenRLHF option)", "dual_clip", {"dual_clip": 3.0}),
        ("roll dual_clip_loss (c = 1 + 2*pg_clip = 1.4)", "dual_clip", {"dual_clip": 1.4}),
    ],
)
def test_clip_and_dual_clip(golden, variant, name, options) -> None:
    case = golden("D02")
    ratio = case.tensor(case.inputs["ratio"])
    for position, expected in enumerate(case.expected[variant]):
        loss, _ = policy_loss(
            name,
            logprobs=ratio[position].log().reshape(1, 1),
            old_logprobs=torch.zeros(1, 1, dtype=case.dtype),
            advantages=case.tensor([[case.inputs["advantages"][position]]]),
            loss_mask=torch.ones(1, 1),
            constants=options,
        )
        case.check(loss, expected)


def test_gspo(golden) -> None:
    case = golden("D03")
    given, mask = tokens(case, advantages="seq_adv")
    result = formula("gspo", given)
    case.check(result.ratio.reshape(mask.shape)[:, 0], case.expected["sequence_ratio"])
    for bounds, label in (((3e-4, 4e-4), "3e-4,4e-4"), ((0.2, 0.2), "0.2,0.2")):
        loss, _ = policy_loss(
            "gspo",
            logprobs=case.tensor(case.inputs["logp"]),
            old_logprobs=case.tensor(case.inputs["old_logp"]),
            advantages=case.tensor(case.inputs["seq_adv"]).expand(2, 4),
            loss_mask=mask,
            constants={"clip_low": bounds[0], "clip_high": bounds[1]},
            aggregation="sequence_mean",
        )
        case.check(loss, case.expected[f"mean({label})"])


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("trl default (cap = epsilon_high = 0.2, not 1.2)", {"clip_low": 1.0, "clip_high": -0.8}),
        ("trl with epsilon_high=5.0", {"clip_low": 1.0, "clip_high": 4.0}),
        ("trl with epsilon_high=5.0", {}),
        ("roll (clip to [0.9,1.1])", {"clip_low": 0.1, "clip_high": 0.1}),
    ],
)
def test_cispo(golden, variant, options) -> None:
    case = golden("D05")
    case.check(per_token("cispo", case, **options), case.expected[variant])


def test_cispo_gradient_is_the_weight_times_advantage(golden) -> None:
    case = golden("D05")
    given, mask = tokens(case)
    logprobs = given.logprobs.clone().requires_grad_()
    moved = dataclasses.replace(given, logprobs=logprobs)
    formula("cispo", moved, clip_low=1.0, clip_high=-0.8).loss.sum().backward()
    assert logprobs.grad is not None
    case.check(
        logprobs.grad.reshape(mask.shape), case.expected["gradient scale d(loss)/d(logp), trl default"]
    )


def test_reinforce(golden) -> None:
    case = golden("D07")
    case.check(per_token("reinforce", case), case.expected["vanilla"])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_against_finite_differences(name, aggregation, batch) -> None:
    """Factors with a stop-gradient stay constant: their ratio is frozen as old_logprobs moves along."""

    def loss(logprobs: Tensor, frozen: Tensor | None = None) -> Tensor:
        if frozen is None:
            return call(logprobs)[0]
        weight = _detached_weight(name, batch, frozen)
        plain = -(weight * batch.arrays["advantages"] * logprobs).masked_fill(~batch.mask, 0.0)
        return aggregate(plain, batch.mask, aggregation, constant=constant)

    constant = 10 if aggregation == "constant" else None

    def call(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            name,
            logprobs=logprobs,
            old_logprobs=batch.arrays["old_logprobs"],
            advantages=batch.arrays["advantages"],
            loss_mask=batch.mask,
            aggregation=aggregation,
            constant=constant,
            constants=OPTIONS[name],
        )

    start = batch.arrays["logprobs"]
    variable = start.clone().requires_grad_()
    loss(variable).backward()
    frozen = start if name in ("cispo", "gspo") else None
    step = 1e-6
    assert variable.grad is not None
    assert float(variable.grad.abs().max()) > 1e-3
    for row, column in [(0, 0), (2, 1), (5, 3), (5, 8), (6, 2), (8, 0), (10, 4), (10, 7), (3, 1)]:
        bump = torch.zeros_like(start)
        bump[row, column] = step
        slope = (loss(start + bump, frozen) - loss(start - bump, frozen)) / (2 * step)
        assert float(variable.grad[row, column]) == pytest.approx(float(slope), abs=1e-8)


def _detached_weight(name: str, batch, frozen: Tensor) -> Tensor:
    """Return the stop-gradient factors of cispo and gspo (with its clip), written out separately."""
    log_ratio = (frozen - batch.arrays["old_logprobs"]) * batch.mask
    advantages, total = batch.arrays["advantages"], log_ratio.sum(1, keepdim=True)
    if name == "cispo":
        return log_ratio.exp().clamp(0.9, 1.2)
    ratio = torch.exp(total / batch.mask.sum(1, keepdim=True).clamp(min=1))
    clipped = ((ratio > 1.04) & (advantages > 0)) | ((ratio < 0.95) & (advantages < 0))
    return ratio.expand_as(advantages).masked_fill(clipped, 0.0)


def test_finite_differences_cover_every_loss() -> None:
    assert set(OPTIONS) == set(NAMES) | {"dual_clip"}
    assert {SECTIONS[name] for name in NAMES} == set(LOSSES)


def test_on_policy_gradient_is_reinforce(batch) -> None:
    wanted = _gradient("reinforce", batch)
    for name in OPTIONS:
        torch.testing.assert_close(_gradient(name, batch), wanted, atol=1e-12, rtol=0)


def _gradient(name: str, batch) -> Tensor:
    variable = batch.arrays["old_logprobs"].clone().requires_grad_()
    loss, _ = policy_loss(
        name,
        logprobs=variable,
        old_logprobs=batch.arrays["old_logprobs"],
        advantages=batch.arrays["advantages"],
        loss_mask=batch.mask,
    )
    loss.backward()
    assert variable.grad is not None
    return variable.grad


def _plain_gspo(batch: Any, logprobs: Tensor, bounds: tuple[float, float]) -> Tensor:
    """GSPO's loss as its paper writes it (eq. 5 to 7), a mean over sequences."""
    losses = []
    for row in range(len(batch.mask)):
        inside = batch.mask[row]
        if not inside.any():
            continue
        ratio = (logprobs[row][inside] - batch.arrays["old_logprobs"][row][inside]).mean().exp()
        advantage = batch.arrays["advantages"][row, 0]
        clipped = ratio.clamp(1 - bounds[0], 1 + bounds[1])
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean()


def _gspo(batch: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient)."""
    variable = batch.arrays["logprobs"].clone().requires_grad_()
    named = {name: batch.arrays[name] for name in ("old_logprobs", "advantages")}
    loss, _ = policy_loss("gspo", logprobs=variable, loss_mask=batch.mask, **named, **options)
    loss.backward()
    assert variable.grad is not None
    return loss.detach(), variable.grad


def test_gspo_without_weights_is_the_papers_sequence_form(batch) -> None:
    """Compare value and gradient, with one advantage per sequence."""
    batch.arrays["advantages"] = batch.arrays["advantages"][:, :1].expand_as(batch.mask)
    for bounds in ((0.05, 0.04), (1.0, 9.0)):
        plain = batch.arrays["logprobs"].clone().requires_grad_()
        expected = _plain_gspo(batch, plain, bounds)
        expected.backward()
        constants = {"clip_low": bounds[0], "clip_high": bounds[1]}
        loss, gradient = _gspo(batch, aggregation="sequence_mean", constants=constants)
        torch.testing.assert_close(loss, expected.detach(), atol=1e-14, rtol=0)
        torch.testing.assert_close(gradient, plain.grad, atol=1e-14, rtol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_tokens_weight_scales_its_own_gradient_and_no_others(name, aggregation, batch) -> None:
    """A token with weight 0 gets exactly no gradient, whatever the loss makes of its sequence."""
    constant = 10 if aggregation == "constant" else None

    def gradient(weights: Tensor | None) -> Tensor:
        variable = batch.arrays["logprobs"].clone().requires_grad_()
        named = {n: batch.arrays[n] for n in ("old_logprobs", "advantages")}
        options = {"aggregation": aggregation, "constant": constant, "weights": weights}
        options["constants"] = OPTIONS[name]
        policy_loss(name, logprobs=variable, loss_mask=batch.mask, **named, **options)[0].backward()
        assert variable.grad is not None
        return variable.grad

    weights = (batch.arrays["values"] * 2).clamp(min=0.0)
    dropped = batch.mask & (weights == 0)
    assert bool(dropped.any(1).logical_and((batch.mask & (weights > 0)).any(1)).any())
    assert not bool(gradient(weights)[dropped].any())
    torch.testing.assert_close(gradient(weights), gradient(None) * weights, atol=1e-14, rtol=0)
