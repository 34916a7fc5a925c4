"""What teachers leave on a rank for one update, in the place of logits; and how far the policy is from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mrl.config.sections.distillation import DistillationSection
from mrl.training.divergence import Vocabulary, divergence
from mrl.training.top_tokens import top_divergence, top_tokens


class Said(Protocol):
    """What a teacher says of the next token at n places."""

    def divergence(
        self,
        rows: Tensor,
        hidden: Tensor,
        weight: Tensor,
        section: DistillationSection,
        vocabulary: Vocabulary,
    ) -> Tensor:
        """[m] of the policy with hidden states [m, D] and this rank's output layer `weight`; rows [m]: which place each is."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class States:
    """Everything: from these the teacher's whole distributions are computed again."""

    hidden: Tensor
    """[n, D] hidden states before the output layer."""
    head: Tensor
    """[V / tp, D] this rank's rows of the teacher's output layer."""

    def divergence(
        self,
        rows: Tensor,
        hidden: Tensor,
        weight: Tensor,
        section: DistillationSection,
        vocabulary: Vocabulary,
    ) -> Tensor:
        """As Said has it."""
        taught, kind = self.hidden.index_select(0, rows), section.divergence
        share = section.teacher_share
        return divergence(hidden, weight, taught, self.head, kind=kind, share=share, vocabulary=vocabulary)


@dataclasses.dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens, and all others together."""

    ids: Tensor
    """[n, k] int32."""
    log_probs: Tensor
    """[n, k + 1]."""

    def divergence(
        self,
        rows: Tensor,
        hidden: Tensor,
        weight: Tensor,
        section: DistillationSection,
        vocabulary: Vocabulary,
    ) -> Tensor:
        """As Said has it."""
        ids, taught = self.ids.index_select(0, rows), self.log_probs.index_select(0, rows)
        kind, share = section.divergence, section.teacher_share
        return top_divergence(hidden, weight, ids, taught, kind=kind, share=share, vocabulary=vocabulary)


@dataclasses.dataclass(frozen=True, slots=True)
class Lesson:
    """What one teacher has to say at some places of a batch; a rank has it of what it computes itself."""

    rows: np.ndarray
    """[N] int64 which place of `said` predicts each token of the batch; -1 where the teacher says nothing."""
    said: Said


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
            states = hidden.index_select(0, index)
            found = lesson.said.divergence(taught, states, weight, self.section, vocabulary)
            whole = whole.index_copy(0, index, found)
        return whole


def teacher_targets(
    states: Tensor, weight: Tensor, section: DistillationSection, vocabulary: Vocabulary
) -> tuple[Tensor, ...]:
    """What of a teacher's hidden states [n, D] is kept, in tensors of n rows."""
    if section.estimator == "exact":
        return (states,)
    return top_tokens(states, weight, min(section.top_k, vocabulary.size), vocabulary)


def said(parts: Sequence[Tensor], weight: Tensor, section: DistillationSection) -> Said:
    """Of what was kept; `weight` is the teacher's output layer, which will be the policy's again."""
    if section.estimator == "exact":
        (hidden,) = parts
        return States(hidden, weight.detach().clone())
    ids, log_probs = parts
    return TopTokens(ids, log_probs)


def _value_type(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
