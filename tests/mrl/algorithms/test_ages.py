"""Samples of several versions: ratios, weights and their metrics against a float64 reference by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from mrl.algorithms.objective import Objective
from mrl.algorithms.tokens import Segments
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.loops.staleness import drift_by_staleness, largest_staleness, staleness_metrics, token_counts
from mrl.samples import TrainBatch
from tests.support.samples import make_groups, make_sample

KINDS: dict[str, dict[str, Any]] = {
    "off": {"kind": "off"},
    "truncated": {"kind": "truncated", "high": 1.3},
    "icepop": {"kind": "icepop", "low": 0.7, "high": 1.4},
    "sequence_mask": {"kind": "sequence_mask", "low": 0.9, "high": 1.1, "token_weights": "raw"},
    "geometric": {"kind": "geometric", "high": 1.05},
}


def case(seed: int) -> tuple[TrainBatch, np.ndarray]:
    """Return eight samples with up to three versions each, and the trainer's log-probs [N], float64."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 20, 8)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask, age = np.zeros(bounds[-1], bool), np.zeros(bounds[-1])
    for start, end in itertools.pairwise(bounds):
        first = start + rng.integers(1, 3)
        mask[first:end] = True
        age[first:end] = -np.sort(-rng.integers(0, 3, end - first))
    old = -rng.exponential(1.0, bounds[-1]) * mask
    rollout = (old + rng.normal(0, 0.05, len(old)) * (1 + 3 * age)) * mask
    batch = TrainBatch(
        np.zeros(bounds[-1], np.int64), bounds, mask, np.arange(8), tuple(map(str, range(8)))
    ).with_arrays(
        age=age, rollout_logprobs=rollout, old_logprobs=old, advantages=rng.normal(size=len(old)) * mask
    )
    return batch, (old + rng.normal(0, 0.1, len(old))) * mask


def weight_of(c: Any, w: float, *, mean: float) -> float:
    match c.kind:
        case "truncated":
            return min(w, c.high)
        case "icepop":
            return w if c.low <= w <= c.high else 0.0
        case "sequence_mask":
            return w if c.low <= mean <= c.high else 0.0
        case "geometric":
            return min(mean, c.high)
    return 1.0


def reference(batch: TrainBatch, new: np.ndarray, section: AlgorithmSection) -> tuple[float, float]:
    """Return (loss, mean ratio) token by token: PPO's clip of each ratio, times its weight, token mean."""
    c, total, ratios = section.correction, 0.0, []
    a = batch.arrays
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        trained = [t for t in range(start, end) if batch.loss_mask[t]]
        decoupled = section.old_logprobs == "decoupled"
        old = {
            t: a["old_logprobs"][t] if decoupled or a["age"][t] == 0 else a["rollout_logprobs"][t]
            for t in trained
        }
        log_w = {t: old[t] - a["rollout_logprobs"][t] for t in trained}
        mean = math.exp(sum(log_w.values()) / len(trained))
        for t in trained:
            w = math.exp(log_w[t])
            weight = weight_of(c, w, mean=mean)
            ratio, advantage = math.exp(new[t] - old[t]), a["advantages"][t]
            ratios.append(ratio)
            clipped = min(max(ratio, 0.8), 1.2)
            total -= weight * min(ratio * advantage, clipped * advantage)
    return total / len(ratios), sum(ratios) / len(ratios)


@pytest.mark.parametrize(
    ("kind", "old_logprobs"),
    [(kind, old) for kind in KINDS for old in ("auto", "decoupled") if (kind, old) != ("off", "decoupled")],
)
def test_weights_and_ratios_are_exact_across_versions(kind: str, old_logprobs: str) -> None:
    section = AlgorithmSection.model_validate(
        {
            "old_logprobs": old_logprobs,
            "correction": KINDS[kind],
            "aggregation": {"mode": "token_mean"},
            "minibatches": 2,
        }
    )
    for seed in range(20):
        batch, new = case(seed)
        arrays = {name: torch.from_numpy(values) for name, values in batch.arrays.items()}
        loss, metrics = Objective(section)(
            logprobs=torch.from_numpy(new).requires_grad_(),
            entropy=torch.ones(len(new), dtype=torch.float64),
            arrays=arrays | {"loss_mask": torch.from_numpy(batch.loss_mask)},
            segments=Segments.of(batch.lengths()),
            denominators={
                "num_tokens": float(batch.loss_mask.sum()),
                "num_sequences": 8.0,
                "num_fresh_tokens": float((batch.loss_mask & (batch.arrays["age"] == 0)).sum()),
            },
        )
        expected, ratio = reference(batch, new, section)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
        assert float(metrics["policy/ratio_mean"]) == pytest.approx(ratio, rel=1e-6)
        fresh = batch.loss_mask & (batch.arrays["age"] == 0)
        difference = np.abs(batch.arrays["old_logprobs"] - batch.arrays["rollout_logprobs"])[fresh].mean()
        assert float(metrics["policy/rollout_difference"]) == pytest.approx(difference, rel=1e-6)


def test_sample_sizes_and_kl_by_age_are_those_of_the_formulas() -> None:
    batch, new = case(3)
    metrics = drift_by_staleness(batch, new)
    for age in (1, 2):
        log_w = [
            new[t] - batch.arrays["rollout_logprobs"][t]
            for t in range(batch.num_tokens)
            if batch.loss_mask[t] and batch.arrays["age"][t] == age
        ]
        w = [math.exp(x) for x in log_w]
        ess = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
        kl = sum(math.exp(x) - 1 - x for x in log_w) / len(log_w)
        assert metrics[f"policy/ess/{age}"] == pytest.approx(ess, rel=1e-9)
        assert metrics[f"policy/kl_behaviour/{age}"] == pytest.approx(kl, rel=1e-9)
    assert len(metrics) == 4, "today's tokens are the mismatch's business"


def test_ages_are_counted_over_the_tokens_of_the_policy() -> None:
    """One of four groups is current, one is of a later version; environment tokens have no staleness."""
    versions = [[3, 3, 3], [1, 2, 3], [2, 2, 2], [5, 5, 5]]
    samples = [
        make_sample(n, policy_versions=np.array(row, np.int32), loss_mask=np.array([True, n != 1, True]))
        for n, row in enumerate(versions)
    ]
    groups = make_groups(samples)
    assert largest_staleness(groups, 3) == {
        "policy/staleness_max": 2.0,
        "policy/stale_token_frac": pytest.approx(4 / 11),
        "group/stale_frac": 0.5,
    }
    metrics = staleness_metrics(groups, 3)
    assert metrics["policy/staleness_mean"] == pytest.approx(5 / 11)
    fractions = {age: metrics[f"policy/staleness_frac/{age}"] for age in (0, 1, 2)}
    assert fractions == pytest.approx({0: 7 / 11, 1: 3 / 11, 2: 1 / 11})
    assert largest_staleness([], 3)["policy/staleness_max"] == 0.0 and staleness_metrics([], 3) == {}


@pytest.mark.parametrize("versions", [[[3, 3], [3]], [[5, 5], [5]], [[1, 1], [1]], [[2, 3], [3]], [[], []]])
def test_ages_of_one_version_are_counted_as_those_of_several(versions: list[list[int]]) -> None:
    rows = [np.array(row, np.int32) for row in versions]
    (group,) = make_groups([make_sample(0, policy_versions=v, loss_mask=np.ones(len(v), bool)) for v in rows])
    ages = [max(3 - int(version), 0) for version in np.concatenate(rows)]
    assert token_counts(group, 3).tolist() == [ages.count(age) for age in range(max(ages, default=-1) + 1)]
