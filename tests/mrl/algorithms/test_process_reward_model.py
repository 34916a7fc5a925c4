"""The loss of process reward models against torch's own, and that no microbatch matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from mrl.algorithms.reward_model_objective import ProcessRewardObjective, label_losses
from mrl.algorithms.tokens import Segments
from mrl.config.sections.tune import ObjectiveSection

LENGTHS = np.array([4, 6, 3, 9])
PLACES = [1, 3, 5, 9, 12, 14, 17, 21]
"""Judged steps: of each of the responses at least one."""
LABELS = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 0.9, 1.0, 0.0], dtype=torch.float64)


def section(**settings: Any) -> ObjectiveSection:
    return ObjectiveSection(name="process_reward_model", **settings)


def microbatch(values: Tensor, samples: list[int], **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of some of the responses; `values` [N] of all."""
    mask, labels = torch.zeros(LENGTHS.sum(), dtype=torch.bool), torch.full((int(LENGTHS.sum()),), 7.0)
    mask[PLACES], labels[PLACES] = True, LABELS.float()
    starts = np.cumsum(LENGTHS) - LENGTHS
    own = np.concatenate([np.arange(starts[b], starts[b] + LENGTHS[b]) for b in samples])
    return ProcessRewardObjective(section(**settings))(
        values=values[own],
        arrays={"loss_mask": mask[own], "step_labels": labels[own]},
        segments=Segments.of(LENGTHS[samples]),
        denominators={"num_tokens": float(len(PLACES))},
    )


def drawn_values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64) * 3
    return values.requires_grad_()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_binary_cross_entropy_of_the_judged_places_alone(smoothing: float) -> None:
    values = drawn_values()
    loss, metrics = microbatch(values, [0, 1, 2, 3], smoothing=smoothing)
    (found,) = torch.autograd.grad(loss, values)
    labels = LABELS.float().double() * (1 - smoothing) + (1 - LABELS.float().double()) * smoothing
    theirs = binary_cross_entropy_with_logits(values[PLACES], labels)
    (expected,) = torch.autograd.grad(theirs, values)
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert found.count_nonzero() == len(PLACES)
    assert metrics["process/label"].item() == pytest.approx(LABELS.mean().item(), abs=1e-6)


def test_it_is_the_two_class_loss_of_token_classification() -> None:
    """TRL's trainer of process reward models classifies tokens in two; the score is the difference of the two logits."""
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    classes = torch.tensor([1, 0, 1, 1, 0])
    ours = label_losses(section(), logits[:, 1] - logits[:, 0], classes.double()).mean()
    assert ours.item() == pytest.approx(cross_entropy(logits, classes).item(), abs=1e-12)


def test_microbatches_add_up_to_the_step() -> None:
    values = drawn_values()
    whole, told = microbatch(values, [0, 1, 2, 3])
    parts = [microbatch(values, [0, 2]), microbatch(values, [3]), microbatch(values, [1])]
    assert sum(part[0].item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)
    for name, value in told.items():
        assert sum(part[1][name].item() for part in parts) == pytest.approx(value.item(), abs=1e-12)


def test_scores_far_from_the_label_cost_what_they_are_off() -> None:
    """No logarithm of 0."""
    found = label_losses(section(), torch.tensor([-800.0, 800.0]), torch.tensor([1.0, 1.0]))
    assert found.tolist() == [800.0, 0.0]
