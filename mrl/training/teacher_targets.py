"""Teacher targets that stay on a rank for one update instead of logits, and the divergence from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.config.sections.distillation import DistillationSection
from mrl.training.divergence import Vocabulary, divergence


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's states at n places, from which its whole next-token distributions are recomputed."""

    hidden: Tensor
    """[n, D] hidden states before the output layer."""
    head: Tensor
    """[V / tp, D] this rank's rows of the teacher's output layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherTargets:
    """One teacher's targets at some tokens of a batch, for the tokens that this rank computes."""

    rows: np.ndarray
    """[N] int64 row of `states` that predicts each token of the batch; -1 without a target."""
    states: TeacherStates


@dataclasses.dataclass(frozen=True, slots=True)
class TargetsOfTeachers:
    """Targets of all teachers of a batch; empty off the last pipeline stage."""

    section: DistillationSection
    lessons: Sequence[TeacherTargets]

    def divergence(
        self, places: np.ndarray, hidden: Tensor, weight: Tensor, vocabulary: Vocabulary
    ) -> Tensor:
        """Return the [j] divergence at the batch's tokens `places` [j], 0 without a teacher. `hidden` [j, D]
        are the policy's states before these tokens."""
        whole = torch.zeros(len(places), dtype=_value_type(hidden), device=hidden.device)
        for lesson in self.lessons:
            rows = lesson.rows[places]
            index, taught = (
                torch.from_numpy(array).to(hidden.device)
                for array in (np.flatnonzero(rows >= 0), rows[rows >= 0])
            )
            values = divergence(
                hidden.index_select(0, index),
                weight,
                lesson.states.hidden.index_select(0, taught),
                lesson.states.head,
                kind=self.section.divergence,
                share=self.section.teacher_share,
                vocabulary=vocabulary,
            )
            whole = whole.index_copy(0, index, values)
        return whole


def _value_type(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
