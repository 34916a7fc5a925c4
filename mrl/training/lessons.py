"""What teachers leave on a rank for one update, in the place of logits; and how far the policy is from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.config.sections.distillation import DistillationSection
from mrl.training.divergence import Vocabulary, divergence


@dataclasses.dataclass(frozen=True, slots=True)
class States:
    """What a teacher knows of the next token at n places: from these its whole distributions are computed again."""

    hidden: Tensor
    """[n, D] hidden states before the output layer."""
    head: Tensor
    """[V / tp, D] this rank's rows of the teacher's output layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lesson:
    """What one teacher has to say at some places of a batch; a rank has it of what it computes itself."""

    rows: np.ndarray
    """[N] int64 which place of `states` predicts each token of the batch; -1 where the teacher says nothing."""
    states: States


@dataclasses.dataclass(frozen=True, slots=True)
class Lessons:
    """Of all teachers of a batch, and how far the policy is said to be from them; empty off the last pipeline stage."""

    section: DistillationSection
    lessons: Sequence[Lesson]

    def divergence(
        self, places: np.ndarray, hidden: Tensor, weight: Tensor, vocabulary: Vocabulary
    ) -> Tensor:
        """[j] at the batch's tokens `places` [j], from the policy's hidden states [j, D] before them; 0 where no teacher says
        anything."""
        whole = torch.zeros(len(places), dtype=_value_type(hidden), device=hidden.device)
        for lesson in self.lessons:
            rows = lesson.rows[places]
            index, taught = (
                torch.from_numpy(each).to(hidden.device)
                for each in (np.flatnonzero(rows >= 0), rows[rows >= 0])
            )
            found = divergence(
                hidden.index_select(0, index),
                weight,
                lesson.states.hidden.index_select(0, taught),
                lesson.states.head,
                kind=self.section.divergence,
                share=self.section.teacher_share,
                vocabulary=vocabulary,
            )
            whole = whole.index_copy(0, index, found)
        return whole


def _value_type(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
