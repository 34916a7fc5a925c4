"""Policy losses: golden numbers per formula, finite differences, and the registry."""

import pytest
import torch
from torch import Tensor

from mrl.algorithms import policy_losses
from mrl.algorithms.aggregation import aggregate
from mrl.algorithms.losses import policy_loss
from mrl.algorithms.policy_losses import LOSSES, Tokens
from mrl.algorithms.segments import Segments

OPTIONS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"dual_clip": 1.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.04},
    "cispo": {"clip_low": 0.1, "clip_high": 0.2},
    "topr": {},
    "reinforce": {},
    "kimi15": {"tau": 0.3},
}
"""Bounds tight enough that the random batch crosses all of them."""


def tokens(case, *, advantages: str = "advantages") -> tuple[Tokens, Tensor]:
    mask = case.tensor(case.inputs["mask"]).bool()
    segments = Segments.of(mask)
    given = case.tensor(case.inputs[advantages]).expand(mask.shape)
    arrays = {
        "logprobs": case.tensor(case.inputs["logp"]),
        "old_logprobs": case.tensor(case.inputs["old_logp"]),
        "advantages": given,
    }
    flat = {
        name: segments.flat(values).masked_fill(~segments.flat(mask), 0.0) for name, values in arrays.items()
    }
    scores = case.inputs.get("scores")
    spread = None if scores is None else segments.spread(case.tensor(scores))
    return Tokens(**flat, mask=segments.flat(mask), segments=segments, scores=spread, reduce=None), mask


def per_token(name: str, case, *, advantages: str = "advantages", **options) -> Tensor:
    given, mask = tokens(case, advantages=advantages)
    return policy_losses.find(name)(given, **options).loss.reshape(mask.shape)


@pytest.mark.parametrize(
    ("variant", "name", "options"),
    [
        ("no dual clip", "ppo_clip", {}),
        ("dual_clip=3 (OpenRLHF option)", "dual_clip", {}),
        ("dual_clip=3 (OpenRLHF option)", "ppo_clip", {"dual_clip": 3.0}),
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
            clip_low=0.2,
            clip_high=0.2,
            **options,
        )
        case.check(loss, expected)


def test_gspo(golden) -> None:
    case = golden("D03")
    given, mask = tokens(case, advantages="seq_adv")
    result = policy_losses.gspo(given)
    case.check(result.ratio.reshape(mask.shape)[:, 0], case.expected["sequence_ratio"])
    for bounds, label in (((3e-4, 4e-4), "3e-4,4e-4"), ((0.2, 0.2), "0.2,0.2")):
        loss, _ = policy_loss(
            "gspo",
            logprobs=case.tensor(case.inputs["logp"]),
            old_logprobs=case.tensor(case.inputs["old_logp"]),
            advantages=case.tensor(case.inputs["seq_adv"]).expand(2, 4),
            loss_mask=mask,
            clip_low=bounds[0],
            clip_high=bounds[1],
            aggregation="sequence_mean",
        )
        case.check(loss, case.expected[f"mean({label})"])
    product = policy_losses.gspo(given, normalise=False).ratio.reshape(mask.shape)[:, 0]
    case.check(product, case.expected["trl_rloo_sequence_ratio (product, not normalised)"])


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("trl default (cap = epsilon_high = 0.2, not 1.2)", {"clip_low": 1.0, "clip_high": -0.8}),
        ("trl with epsilon_high=5.0", {"clip_low": 1.0, "clip_high": 4.0}),
        ("trl with epsilon_high=5.0", {}),
        ("roll (clip to [0.9,1.1])", {"clip_low": 0.1, "clip_high": 0.1}),
        ("roll unified mask", {"clip_low": 0.1, "clip_high": 0.1, "mask_clipped": True}),
    ],
)
def test_cispo(golden, variant, options) -> None:
    case = golden("D05")
    case.check(per_token("cispo", case, **options), case.expected[variant])


def test_cispo_gradient_is_the_weight_times_advantage(golden) -> None:
    case = golden("D05")
    given, mask = tokens(case)
    logprobs = given.logprobs.clone().requires_grad_()
    found = Tokens(logprobs, given.old_logprobs, given.advantages, given.mask, given.segments, None, None)
    policy_losses.cispo(found, clip_low=1.0, clip_high=-0.8).loss.sum().backward()
    assert logprobs.grad is not None
    case.check(
        logprobs.grad.reshape(mask.shape), case.expected["gradient scale d(loss)/d(logp), trl default"]
    )


def test_topr(golden) -> None:
    case = golden("D07")
    case.check(per_token("topr", case), case.expected["loss"])
    case.check(per_token("reinforce", case), case.expected["vanilla"])
    given, mask = tokens(case)
    truncated = Tokens(
        given.logprobs,
        given.old_logprobs,
        given.advantages,
        given.mask,
        given.segments,
        torch.zeros_like(given.logprobs),
        None,
    )
    case.check(
        policy_losses.topr(truncated).loss.reshape(mask.shape),
        case.expected["tis variant (clamp [0,1] for all)"],
    )


def test_topr_splits_by_raw_score_and_not_by_advantage() -> None:
    arguments = {
        "logprobs": torch.tensor([[-1.0]], dtype=torch.float64),
        "old_logprobs": torch.tensor([[-0.5]], dtype=torch.float64),
        "advantages": torch.tensor([[-0.25]], dtype=torch.float64),
        "loss_mask": torch.ones(1, 1),
    }
    by_score, _ = policy_loss("topr", scores=torch.tensor([0.5], dtype=torch.float64), **arguments)
    by_sign, _ = policy_loss("topr", **arguments)
    assert float(by_score) == pytest.approx(-0.25)
    assert float(by_sign) == pytest.approx(-0.25 * 0.6065306597126334)


def test_kimi15(golden) -> None:
    case = golden("D08")
    case.check(per_token("kimi15", case, tau=case.params["tau"]), case.expected["loss"])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_against_finite_differences(name, aggregation, batch) -> None:
    """What carries a stop-gradient is held at its value: its ratio is frozen through old_logprobs moving along."""

    def loss(logprobs: Tensor, frozen: Tensor | None = None) -> Tensor:
        if frozen is None:
            return call(logprobs)[0]
        weight = _detached_weight(name, batch, frozen)
        plain = -(weight * batch.arrays["advantages"] * logprobs).masked_fill(~batch.mask, 0.0)
        return aggregate(plain, batch.mask, aggregation, constant=constant)

    constant = 10.0 if aggregation == "constant" else None

    def call(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            name,
            logprobs=logprobs,
            old_logprobs=batch.arrays["old_logprobs"],
            advantages=batch.arrays["advantages"],
            loss_mask=batch.mask,
            aggregation=aggregation,
            constant=constant,
            **OPTIONS[name],
        )

    start = batch.arrays["logprobs"]
    variable = start.clone().requires_grad_()
    loss(variable).backward()
    frozen = start if name in ("cispo", "topr") else None
    step = 1e-6
    assert variable.grad is not None
    assert float(variable.grad.abs().max()) > 1e-3
    for row, column in [(0, 0), (2, 1), (5, 3), (5, 8), (6, 2), (8, 0), (10, 4), (10, 7), (3, 1)]:
        bump = torch.zeros_like(start)
        bump[row, column] = step
        slope = (loss(start + bump, frozen) - loss(start - bump, frozen)) / (2 * step)
        assert float(variable.grad[row, column]) == pytest.approx(float(slope), abs=1e-8)


def _detached_weight(name: str, batch, frozen: Tensor) -> Tensor:
    """The stop-gradient factors of cispo and topr, written out on their own."""
    ratio = torch.exp(frozen - batch.arrays["old_logprobs"])
    if name == "cispo":
        return ratio.clamp(0.9, 1.2)
    return torch.where(batch.arrays["advantages"] > 0, torch.ones_like(ratio), ratio.clamp(0, 1))


def test_finite_differences_cover_every_loss() -> None:
    assert set(OPTIONS) == set(LOSSES)


def test_on_policy_gradient_is_reinforce(batch) -> None:
    """At logprobs = old_logprobs every loss has the gradient of REINFORCE (gspo: spread over the sequence)."""
    wanted = _gradient("reinforce", batch)
    for name in ("ppo_clip", "dual_clip", "cispo", "topr", "kimi15"):
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


def test_a_users_loss_is_one_registration_away(batch) -> None:
    @policy_losses.register("half_reinforce")
    def half(given: Tokens, *, factor: float = 0.5) -> policy_losses.PerToken:
        plain = policy_losses.reinforce(given)
        return policy_losses.PerToken(factor * plain.loss, plain.ratio, plain.clipped_low, plain.clipped_high)

    try:
        arguments = {
            "logprobs": batch.arrays["logprobs"],
            "old_logprobs": batch.arrays["old_logprobs"],
            "advantages": batch.arrays["advantages"],
            "loss_mask": batch.mask,
        }
        whole, _ = policy_loss("reinforce", **arguments)
        found, _ = policy_loss("half_reinforce", **arguments)
        quarter, _ = policy_loss("half_reinforce", factor=0.25, **arguments)
        assert float(found) == pytest.approx(float(whole) / 2)
        assert float(quarter) == pytest.approx(float(whole) / 4)
        with pytest.raises(ValueError, match="'half_reinforce' is already registered"):
            policy_losses.register("half_reinforce")(half)
        with pytest.raises(ValueError, match="takes no fctor; it takes: factor"):
            policy_loss("half_reinforce", fctor=1.0, **arguments)
    finally:
        del LOSSES["half_reinforce"]
