"""Settings of on-policy distillation: teachers give next-token distributions on the policy's samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.section import Section, known_name

_Divergences = Literal["reverse", "forward", "jsd"]
Divergence = Annotated[_Divergences, BeforeValidator(known_name("divergence", _Divergences))]

TEACHER = "teacher"
"""Key of TrainBatch.samples: [B] int64 index of the teacher in DistillationSection.folders; -1: none."""


class DistillationSection(Section):
    """Teachers of the policy, with its vocabulary; docs/algorithms.md has the formulas."""

    teachers: dict[str, str] = Field(min_length=1)
    """Map domains to teacher folders or hub names (rows without a domain are `default`); other domains have
    no teacher."""
    divergence: Divergence = "reverse"
    """Minimise, at every token over the whole vocabulary, KL(policy || teacher) (reverse), KL(teacher ||
    policy) (forward), or the generalised Jensen-Shannon divergence (jsd)."""
    teacher_share: float = Field(default=0.5, gt=0, lt=1)
    """jsd: weight the teacher by this in the mixture that both are compared with."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight the term by this."""
    teachers_only: bool = False
    """Learn from the teachers only: replace the rewards' advantages by 0, and only measure rewards."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Each teacher once, in the order in which domains name them."""
        return tuple(dict.fromkeys(self.teachers.values()))

    def faults(self) -> Iterator[str]:
        if self.divergence != "jsd" and self.teacher_share != 0.5:
            yield (
                f"teacher_share = {self.teacher_share} is only read by divergence = jsd, not by "
                f"{self.divergence}; remove it or choose jsd"
            )
