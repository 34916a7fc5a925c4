"""What teachers leave on a rank for one update: hidden states of its tokens and an output layer, in the place of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from mrl.config.sections.distillation import Divergence


@dataclasses.dataclass(frozen=True, slots=True)
class Lesson:
    """What one teacher has to say of the next token at some places of a batch; a rank has it of what it computes itself."""

    rows: np.ndarray
    """[N] int64 which of the states predicts each token of the batch; -1 where the teacher says nothing."""
    states: Tensor
    """[n, D] hidden states before the output layer."""
    head: Tensor
    """[V / tp, D] this rank's rows of the teacher's output layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lessons:
    """Of all teachers of a batch, and how far the policy is said to be from them; empty off the last pipeline stage."""

    divergence: Divergence
    teacher_share: float
    lessons: Sequence[Lesson]
