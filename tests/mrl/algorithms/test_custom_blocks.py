"""A user's losses and estimators: six from papers through the interface, and what it hands them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.algorithms.advantages import Rollouts, estimate_advantages, try_estimator
from mrl.algorithms.losses import PerToken, Tokens, loss_of, try_loss
from mrl.algorithms.objective import Objective
from mrl.algorithms.tokens import Segments
from mrl.config.sections.algorithm import AlgorithmSection, EstimatorSection
from mrl.config.sections.policy_loss import CustomLoss, DppoTvLoss
from mrl.errors import ConfigError


def kept(tokens: Tokens, dropped: Tensor, loss: Tensor, **metrics: Tensor) -> PerToken:
    never = torch.zeros_like(tokens.mask)
    ratio = tokens.ratio().detach()
    metrics |= {"dropped": dropped.double()}
    return PerToken(loss.masked_fill(dropped, 0.0), ratio, never, never, metrics)


def dppo_tv(tokens: Tokens, *, bound: float) -> PerToken:
    """arXiv 2602.04879, with the binary total variation."""
    moved = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    return kept(
        tokens,
        moved * tokens.advantages.sign() > bound,
        -tokens.ratio() * tokens.advantages,
        moved=moved.abs(),
    )


def ipo(tokens: Tokens, *, eps: float = 0.3, tau: float = 1e-3) -> PerToken:
    """prime-rl's loss: no token whose probability differs from the engine's, and a squared log ratio."""
    assert tokens.rollout_logprobs is not None
    log_ratio = tokens.logprobs - tokens.rollout_logprobs
    dropped = (tokens.logprobs.exp() - tokens.rollout_logprobs.exp()).abs().detach() > eps
    loss = (-log_ratio.exp() * tokens.advantages).masked_fill(dropped, 0.0) + tau * log_ratio**2
    return kept(tokens, torch.zeros_like(dropped), loss)


def sapo(tokens: Tokens, *, positive: float = 1.0, negative: float = 1.05) -> PerToken:
    """arXiv 2511.20347: a sigmoid gate instead of a clip."""
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (tokens.ratio() - 1)) * 4 / tau
    return kept(tokens, torch.zeros_like(tokens.mask), -gate * tokens.advantages)


def off_policy_mask(tokens: Tokens, *, max_kl: float) -> PerToken:
    """arXiv 2512.02556, eq. 9."""
    assert tokens.rollout_logprobs is not None
    drift = (tokens.rollout_logprobs - tokens.logprobs).detach()
    far = tokens.segments.to_tokens(tokens.segments.mean(drift, tokens.mask)) > max_kl
    return kept(tokens, far & (tokens.advantages < 0), -tokens.ratio() * tokens.advantages)


def kl_cov(tokens: Tokens, *, share: float = 0.5, beta: float = 1.0) -> PerToken:
    """arXiv 2505.22617: a KL on the tokens whose log-prob and advantage covary most, of each micro-batch."""
    mask, logprobs = tokens.mask, tokens.logprobs.detach()
    centre = lambda x: x - x[mask].mean()  # noqa: E731
    covariance = (centre(logprobs) * centre(tokens.advantages)).masked_fill(~mask, -torch.inf)
    chosen = torch.zeros_like(mask)
    chosen[covariance.topk(max(1, int(share * int(mask.sum())))).indices] = True
    penalty = beta * (tokens.logprobs - tokens.old_logprobs).abs().masked_fill(~chosen, 0.0)
    return kept(tokens, torch.zeros_like(mask), -tokens.ratio() * tokens.advantages + penalty)


def maxrl(rollouts: Rollouts) -> Tensor:
    """arXiv 2602.02710."""
    scores, groups = rollouts.scores(), rollouts.groups
    centred = groups.centred(scores)
    mean = scores - centred
    return torch.where(mean > 0, centred / mean.clamp(min=1e-9), 0.0)


def tokens(**changes: Any) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: -torch.rand(12, generator=generator, dtype=torch.float64) * 2  # noqa: E731
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1]).bool()
    fields = {
        "mask": mask,
        "segments": Segments.of(np.array([6, 4, 2]), values={"group": np.array([3, 3, 8])}),
        "num_tokens": torch.tensor(8.0),
        "num_sequences": torch.tensor(3.0),
        "logprobs": draw().masked_fill(~mask, 0.0).requires_grad_(),
        "old_logprobs": draw().masked_fill(~mask, 0.0),
        "rollout_logprobs": draw().masked_fill(~mask, 0.0),
        "advantages": torch.tensor([0.0, 1, 1, 0, 1, 1, 0, -2, -2, -2, 0, 1]).double(),
    }
    return Tokens(**fields | changes)


def gradient(loss: Tensor, over: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), over)[0]


@pytest.mark.parametrize("bound", [0.05, 0.2, 0.5])
def test_dppo_by_name_is_the_users(bound: float) -> None:
    given = tokens()
    named = loss_of(DppoTvLoss(low=bound, high=bound))(given)
    custom = loss_of(CustomLoss(function=f"{__name__}:dppo_tv", options={"bound": bound}))(given)
    assert torch.equal(named.loss, custom.loss)
    dropped = named.clipped_low | named.clipped_high
    assert torch.equal(dropped.double(), custom.metrics["dropped"])
    assert dropped.any() == (bound < 0.5) and not dropped.all()
    assert not gradient(named.loss, given.logprobs)[dropped].any()


def test_dppo_drops_moves_along_the_advantage_only() -> None:
    """A token that has become likelier is dropped only if its advantage would make it likelier still."""
    old, new = torch.tensor([0.3, 0.3, 0.7, 0.7]).log(), torch.tensor([0.7, 0.7, 0.3, 0.3]).log()
    given = tokens(
        mask=torch.ones(4, dtype=torch.bool),
        segments=Segments.of(np.array([4])),
        logprobs=new.requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
    )
    result = loss_of(DppoTvLoss())(given)
    assert result.clipped_high.tolist() == [True, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]


def objective(
    loss: dict[str, Any], correction: dict[str, Any], given: Tokens
) -> tuple[Tensor, dict[str, Tensor]]:
    section = AlgorithmSection.model_validate({
        "loss": loss, "correction": correction, "aggregation": {"mode": "token_mean"}, "minibatches": 2,
    })  # fmt: skip
    assert given.rollout_logprobs is not None
    arrays = {"loss_mask": given.mask, "advantages": given.advantages} | {
        name: getattr(given, name).detach() for name in ("old_logprobs", "rollout_logprobs")
    }
    total, metrics = Objective(section)(
        logprobs=given.logprobs,
        entropy=torch.ones_like(given.logprobs),
        arrays=arrays,
        segments=given.segments,
        denominators={"num_tokens": 8.0, "num_sequences": 3.0},
    )
    return gradient(total, given.logprobs), metrics


@pytest.mark.parametrize("max_kl", [0.01, 5.0])
def test_the_off_policy_mask_by_name_is_the_users(max_kl: float) -> None:
    given = tokens()
    wide = {"name": "ppo_clip", "clip_low": 1.0, "clip_high": 1e9}
    named, metrics = objective(wide, {"kind": "off_policy_mask", "max_kl": max_kl}, given)
    function = {"name": "custom", "function": f"{__name__}:off_policy_mask", "options": {"max_kl": max_kl}}
    custom, reported = objective(function, {"kind": "off"}, given)
    torch.testing.assert_close(named, custom, rtol=0, atol=1e-15)
    assert float(metrics["policy/correction_dropped_frac"]) == float(reported["policy/custom/dropped"])
    dropped = given.segments.ids == 1  # the only sequence of negative advantage
    drift = (given.rollout_logprobs - given.logprobs.detach())[dropped & given.mask].mean()
    assert bool(named[dropped & given.mask].any()) == (float(drift) <= max_kl)


def rollouts(rewards: list[float], groups: list[int]) -> Rollouts:
    lengths = np.array([2] * len(rewards))
    token_rewards = torch.zeros(2 * len(rewards), dtype=torch.float64)
    token_rewards[1::2] = torch.tensor(rewards, dtype=torch.float64)
    return Rollouts.of(
        token_rewards=token_rewards,
        mask=torch.ones(len(token_rewards), dtype=torch.bool),
        segments=Segments.of(lengths),
        group_ids=torch.tensor(groups),
    )


def test_maxrl_by_name_is_the_users() -> None:
    given = rollouts([1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1], [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2)
    named, _ = estimate_advantages(EstimatorSection(name="maxrl"), given)
    custom, _ = estimate_advantages(EstimatorSection(name="custom", function=f"{__name__}:maxrl"), given)
    torch.testing.assert_close(named, custom, rtol=0, atol=1e-12)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3, 0, 0, 0, 0]
    torch.testing.assert_close(named[::2], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_maxrl_is_the_gradient_of_the_log_probability_of_success() -> None:
    """Enumerate all groups of N = 4 draws from three answers, of which one is right.

    log p is minus the sum of (1 - p)^k / k, so its gradient is the sum of grad pass@k / k (arXiv 2602.02710).
    A group's mean of A grad log p has that sum up to k = N - 1 as its expectation.
    """
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    size, probabilities = 4, torch.softmax(logits, 0)
    total = torch.zeros(3, dtype=torch.float64)
    for group in np.ndindex(*[3] * size):
        given = rollouts([float(answer == 0) for answer in group], [0] * size)
        advantages, _ = estimate_advantages(EstimatorSection(name="maxrl"), given)
        chance = torch.stack([probabilities[answer] for answer in group]).prod().detach()
        score = sum(a * probabilities[answer].log() for a, answer in zip(advantages[::2], group, strict=True))
        total += chance * torch.autograd.grad(score, logits, retain_graph=True)[0]
    series = sum((1 - (1 - probabilities[0]) ** k) / k for k in range(1, size))
    log_like = torch.autograd.grad(series, logits)[0]
    torch.testing.assert_close(total / size, log_like, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", ["dppo_tv", "ipo", "sapo", "off_policy_mask", "kl_cov"])
def test_losses_of_papers_pass_the_trial_and_have_a_gradient_of_their_own_tokens(function: str) -> None:
    options = {"dppo_tv": {"bound": 0.2}, "off_policy_mask": {"max_kl": 0.1}}.get(function, {})
    section = CustomLoss(function=f"{__name__}:{function}", options=options)
    try_loss(section)
    given = tokens()
    per_token = loss_of(section)(given).loss
    for position in given.mask.nonzero()[:, 0].tolist():
        (slope,) = torch.autograd.grad(per_token[position], given.logprobs, retain_graph=True)
        slope[position] = 0
        assert not slope.any()


def test_sapo_is_close_to_reinforce_near_the_old_policy() -> None:
    given = tokens()
    near = dataclasses.replace(given, old_logprobs=given.logprobs.detach())
    ours = gradient(sapo(near).loss, given.logprobs)
    torch.testing.assert_close(ours[given.mask], -given.advantages[given.mask])


def test_turns_and_groups_of_tokens() -> None:
    given = tokens()
    turns = given.turns()
    assert turns[given.mask].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert given.groups().tolist() == [3] * 10 + [8] * 2


def halves(rollouts: Rollouts) -> Tensor:
    return torch.full((len(rollouts.mask),), 0.5)


def test_an_estimator_may_give_each_token_its_own_advantage() -> None:
    section = EstimatorSection(name="custom", function=f"{__name__}:halves")
    try_estimator(section)
    given = rollouts([1.0, 0.0], [0, 0])
    masked = dataclasses.replace(given, mask=torch.tensor([True, False, True, True]))
    advantages, _ = estimate_advantages(section, masked)
    assert advantages.tolist() == [0.5, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "custom"}, "set a function with custom"),
        ({"name": "grpo", "function": "a:b"}, "set a function with custom"),
        ({"name": "grpo", "options": {"x": 1}}, "only read by custom"),
        ({"name": "maxrl", "scale": "group"}, "maxrl divides by the group's mean"),
    ],
)
def test_settings_that_have_no_effect_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EstimatorSection.model_validate(fields)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(
        ValueError, match="reward -1 of sample 1: the estimator maxrl needs rewards of at least 0"
    ):
        estimate_advantages(EstimatorSection(name="maxrl"), rollouts([1.0, -1.0], [0, 0]))
    with pytest.raises(ValueError, match="maxrl divides by the mean reward"):
        AlgorithmSection.model_validate({
            "estimator": {"name": "maxrl"}, "kl": {"location": "reward", "coefficient": 0.1},
        })  # fmt: skip


def nothing(rollouts: Rollouts) -> Tensor:
    return rollouts.scores() / 0


def test_an_estimator_without_finite_numbers_fails_its_trial() -> None:
    with pytest.raises(ConfigError, match=r"a trial on made-up numbers .* it returned"):
        try_estimator(EstimatorSection(name="custom", function=f"{__name__}:nothing"))
