"""Settings of low-rank adapters."""

from typing import Literal

from pydantic import Field, field_validator

from mrl.section import Section

Target = Literal["attention", "mlp", "shared_experts", "routed_experts"]
"""Linear layers of a model by the part they belong to; mlp: those of layers without experts."""


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a frozen weight W acts as W + (alpha / rank) B A.

    There is no dropout: two passes over a sample must give it the same log-probs.
    """

    rank: int = Field(default=16, ge=1)
    """Set the rank: the rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale B A by alpha / rank."""
    targets: tuple[Target, ...] = Field(default=("attention",), min_length=1)
    """Adapt these linear layers: attention, mlp, shared_experts, routed_experts (one adapter per expert)."""

    @field_validator("targets")
    @classmethod
    def _named_once(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(targets)) != len(targets):
            raise ValueError(f"targets contains a duplicate: {', '.join(targets)}")
        return targets

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank
