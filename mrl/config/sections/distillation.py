"""Distillation on the policy's own samples: teachers that say at each token how likely every next one is to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.section import Section, named

_Divergences = Literal["reverse", "forward", "jsd"]
Divergence = Annotated[_Divergences, BeforeValidator(named("divergence", _Divergences))]

TEACHER = "teacher"
"""Of TrainBatch.samples: [B] int64, which of DistillationSection.folders teaches the sample; -1 where none does."""


class DistillationSection(Section):
    """Teachers of the policy, each of the same shapes and tokens; formulas stand in docs/algorithms.md."""

    teachers: dict[str, str] = Field(min_length=1)
    """Folder of the teacher of each domain (rows without one are of `default`); samples of other domains have none."""
    divergence: Divergence = "reverse"
    """What an update lowers at every token, over the whole vocabulary. reverse: KL(policy || teacher); forward: KL(teacher || policy);
    jsd: the generalised Jensen-Shannon divergence between the two."""
    teacher_share: float = Field(default=0.5, gt=0, lt=1)
    """jsd: share of the teacher in the mixture that both are compared with."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the term."""
    alone: bool = False
    """Whether the teachers are all that is learned from: advantages of rewards are replaced by 0, rewards only measured."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Each teacher once, in the order in which domains name them."""
        return tuple(dict.fromkeys(self.teachers.values()))

    def faults(self) -> Iterator[str]:
        if self.divergence != "jsd" and self.teacher_share != 0.5:
            yield (
                f"teacher_share = {self.teacher_share} is read by divergence = jsd only, not by {self.divergence}; "
                "remove it or choose jsd"
            )
