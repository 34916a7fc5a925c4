"""Distillation on the policy's own samples: teachers that say of each token how likely it was to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.section import Section, named

_Divergences = Literal["reverse", "forward", "jsd"]
Divergence = Annotated[_Divergences, BeforeValidator(named("divergence", _Divergences))]


class DistillationSection(Section):
    """Teachers of the policy, each of the same shapes and tokens; formulas stand in docs/algorithms.md."""

    teachers: dict[str, str] = Field(min_length=1)
    """Folder of the teacher of each domain (rows without one are of `default`); samples of other domains have none."""
    divergence: Divergence = "reverse"
    """What the gradient lowers at every token. reverse: KL(policy || teacher); forward: KL(teacher || policy); jsd: the
    generalised Jensen-Shannon divergence between the two."""
    estimator: Literal["sampled", "exact"] = "exact"
    """exact: the divergence over the whole vocabulary at every token, in the update; sampled: the teacher's log-prob of the sampled token, as an advantage that is added after the
    estimator."""
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
