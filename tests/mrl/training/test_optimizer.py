"""The learning-rate schedule."""

from __future__ import annotations

import pytest
import torch

from mrl.config.sections.training import OptimizerSection
from mrl.errors import ConfigError
from mrl.training.optimizer import Optimizer, learning_rate, megatron_config


def test_warmup_reaches_the_peak_and_stays() -> None:
    section = OptimizerSection(lr=2.0, warmup_steps=4)
    assert [learning_rate(section, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_the_smallest_rate(schedule: str, middle: float) -> None:
    section = OptimizerSection(lr=1.0, min_lr=0.1, schedule=schedule, decay_steps=10)  # type: ignore
    rates = [learning_rate(section, step) for step in range(15)]
    assert rates[0] == 1.0 and rates[5] == pytest.approx(middle)
    assert rates[10:] == pytest.approx([0.1] * 5)
    assert rates == sorted(rates, reverse=True)


def test_a_schedule_of_loop_steps_counts_their_updates() -> None:
    """Two steps of three updates up, then two steps down."""
    steps = OptimizerSection(
        lr=1.0, warmup_steps=2, schedule="linear", decay_steps=4, schedule_unit="steps"
    ).in_updates(3)
    assert (steps.warmup_steps, steps.decay_steps, steps.schedule_unit) == (6, 12, "updates")
    rates = [learning_rate(steps, update) for update in range(13)]
    expected = [k / 6 for k in range(1, 7)] + [1 - k / 6 for k in range(7)]
    assert rates == pytest.approx(expected)
    assert steps.in_updates(3) == steps


def test_an_optimizer_takes_only_a_schedule_of_updates() -> None:
    with pytest.raises(ValueError, match="in_updates"):
        Optimizer(
            [], OptimizerSection(schedule_unit="steps"), dtype=torch.float32, device=torch.device("cpu")
        )


def test_bfloat16_moments_are_refused_by_name_where_they_cannot_be() -> None:
    section = OptimizerSection(moments_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"needs training\.dtype = bfloat16"):
        megatron_config(section, torch.float32)
    with pytest.raises(ConfigError, match="needs Transformer Engine"):
        megatron_config(section, torch.bfloat16)


def test_torchs_adam_works_on_one_shard_after_the_other() -> None:
    """Its GPU default updates all shards at once, with one more float32 copy; checkpoints bring that back."""
    optimizer, adam = Optimizer.__new__(Optimizer), torch.optim.AdamW([torch.zeros(3)], foreach=True)
    optimizer.section, optimizer.megatron = OptimizerSection(), adam
    optimizer._set_groups(1e-3)
    assert [(group["foreach"], group["lr"]) for group in adam.param_groups] == [(False, 1e-3)]
