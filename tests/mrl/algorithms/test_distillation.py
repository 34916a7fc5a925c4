"""Teachers' terms: their expected gradient is the divergence's own, their mean is its value, and they join rewards last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from mrl.algorithms.distillation_terms import TEACHER, sampled
from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.distillation import DistillationSection
from mrl.samples import TrainBatch

KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


def section(**more: Any) -> DistillationSection:
    return DistillationSection(**({"teachers": {"default": "one"}, "estimator": "sampled"} | more))


def divergence(kind: str, share: float, policy: Tensor, teacher: Tensor) -> Tensor:
    """Of two distributions [V], in nats, from the definitions."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum()

    mixture = share * teacher + (1 - share) * policy
    return {
        "reverse": kl(policy, teacher),
        "forward": kl(teacher, policy),
        "jsd": share * kl(teacher, mixture) + (1 - share) * kl(policy, mixture),
    }[kind]


@pytest.mark.parametrize(("kind", "share"), KINDS)
def test_the_expected_gradient_is_that_of_the_named_divergence(kind: str, share: float) -> None:
    """Over all tokens a policy may sample, by enumeration."""
    logits, other = torch.randn(2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_(True)
    policy, teacher = logits.softmax(0), other.softmax(0)
    options = {"teacher_share": share} if kind == "jsd" else {}
    advantages, estimates = sampled(section(divergence=kind, **options), (teacher / policy).log().detach())
    exact = divergence(kind, share, policy, teacher)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(-(policy.detach() * advantages * policy.log()).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((policy * estimates).sum(), exact, rtol=1e-12, atol=1e-12)
    assert kind == "reverse" or bool((estimates >= 0).all())


def batch(teachers: list[int], log_ratio: float, **arrays: np.ndarray) -> TrainBatch:
    """Samples of one prompt token and two of the policy; the teachers' log-probs are the policy's and `log_ratio`."""
    count = 3 * len(teachers)
    policy = -np.linspace(0.1, 1, count, dtype=np.float32)
    return TrainBatch(
        tokens=np.zeros(count, np.int32),
        cu_seqlens=np.arange(0, count + 1, 3, dtype=np.int32),
        loss_mask=np.tile([False, True, True], len(teachers)),
        group_ids=np.zeros(len(teachers), np.int64),
        sample_ids=tuple(map(str, range(len(teachers)))),
        arrays={"rollout_logprobs": policy, "teacher_logprobs": policy + np.float32(log_ratio), **arrays},
        samples={TEACHER: np.array(teachers)},
    )


def advantages(config: AlgorithmSection, given: TrainBatch, rewards: list[float]) -> Any:
    """([B, 2] advantages of the policy's tokens, metrics)."""
    estimated, metrics = shape_and_estimate(config, given, np.array(rewards))
    return estimated.arrays["advantages"].reshape(-1, 3)[:, 1:], metrics


def algorithm(**more: Any) -> AlgorithmSection:
    blocks = {"estimator": {"name": "dr_grpo"}, "aggregation": {"mode": "token_mean"}}
    return AlgorithmSection.model_validate(blocks | {"distillation": section(**more)})


def test_a_term_is_added_after_the_estimator_where_there_is_a_teacher() -> None:
    found, metrics = advantages(algorithm(coefficient=0.5), batch([0, -1], 0.3), [1.0, 0.0])
    np.testing.assert_allclose(found, [[0.65, 0.65], [-0.5, -0.5]], rtol=1e-5)
    assert metrics["distillation/divergence"] == pytest.approx(-0.3, abs=1e-6)
    assert metrics["distillation/taught_frac"] == 0.5 and metrics["distillation/clipped_frac"] == 0
    assert metrics["advantage/abs_max"] == 0.5, "of the rewards alone"


def test_alone_replaces_the_advantages_of_rewards() -> None:
    found, _ = advantages(algorithm(alone=True), batch([0, -1], 0.3), [1.0, 0.0])
    np.testing.assert_allclose(found, [[0.3, 0.3], [0.0, 0.0]], atol=1e-6)


def test_log_probs_of_a_pass_come_before_the_engines() -> None:
    given = batch([0], 0.3)
    recomputed = given.with_arrays(old_logprobs=given.arrays["rollout_logprobs"] + np.float32(0.1))
    found, _ = advantages(algorithm(alone=True), recomputed, [1.0])
    np.testing.assert_allclose(found, [[0.2, 0.2]], atol=1e-6)


def test_extreme_tokens_are_clipped_and_counted() -> None:
    found, metrics = advantages(algorithm(alone=True), batch([0, 0], -50.0), [1.0, 0.0])
    np.testing.assert_array_equal(found, -10)
    assert metrics["distillation/clipped_frac"] == 1 and metrics["distillation/divergence"] == pytest.approx(
        50
    )


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_a_token_that_is_nearly_impossible_to_one_of_the_two_stays_finite(kind: str) -> None:
    terms, estimates = sampled(section(divergence=kind), torch.tensor([-1e4, 1e4], dtype=torch.float64))
    assert bool(torch.isfinite(terms).all()) and bool(torch.isfinite(estimates).all())


def test_a_sample_without_a_reward_is_not_taught() -> None:
    """It enters no loss at all, so that an outage of the verifier is no lesson."""
    found, metrics = advantages(algorithm(alone=True), batch([0, 0], 0.3), [1.0, float("nan")])
    np.testing.assert_allclose(found, [[0.3, 0.3], [0.0, 0.0]], atol=1e-6)
    assert metrics["distillation/taught_frac"] == 1


def test_missing_log_probs_are_named() -> None:
    given = batch([0], 0.3)
    del given.arrays["teacher_logprobs"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"no teacher_logprobs.*algorithm\.distillation"):
        shape_and_estimate(algorithm(), given, np.array([1.0]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss": {"name": "topr"}, "distillation": {"estimator": "sampled"}},
         "topr sorts samples by their rewards"),
        ({"filter": {}, "distillation": {"alone": True}}, "which groups the teachers see"),
        ({"estimator": {"name": "gae"}, "distillation": {"alone": True}}, "read the critic's values"),
        ({"distillation": {"teachers": {}}}, "at least 1 item"),
        ({"distillation": {"teacher_share": 0.3}}, "read by divergence = jsd only"),
        ({"distillation": {"divergence": "k3"}}, "reverse, forward, jsd"),
    ],
)  # fmt: skip
def test_what_cannot_work_together_is_refused(more: dict[str, Any], message: str) -> None:
    distillation = {"teachers": {"default": "one"}} | more.get("distillation", {})
    with pytest.raises(ValidationError, match=message):
        AlgorithmSection.model_validate(more | {"distillation": distillation})
